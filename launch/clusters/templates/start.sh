{% if job.env_file %}
chmod 600 {{ source | quote }}/{{ job.env_file.relative_to(job.folder) | quote }}
{% endif %}
mkdir -p {{ job.folder | quote }} &&
(umask 077 && cp -rL {{ source | quote }}/. {{ job.folder | quote }}) &&
cd {{ job.folder | quote }} || exit 1
{% include "enter.sh" %}
exec python -m areal_lite.launch.clusters.attempts {{ job.record | quote }}
