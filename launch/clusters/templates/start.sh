{% if job.env_file %}
chmod 600 {{ source | quote }}/{{ job.env_file.relative_to(job.folder) | quote }}
{% endif %}
mkdir -p {{ job.folder | quote }} &&
(umask 077 && cp -rL {{ source | quote }}/. {{ job.folder | quote }}) &&
cd {{ job.folder | quote }} || exit 1
{% include "enter.sh" %}
python -P -c "import areal_lite.launch.clusters" || {
    echo "ConfigError: areal-lite must be installed on $HOSTNAME, got none in $(command -v python || echo 'no python'). Fix: activate its environment with enter in the profile, or install it there from a clone (pip install CLONE)" >&2
    exit 1
}
exec python -P -m areal_lite.launch.clusters.attempts {{ job.record | quote }}
