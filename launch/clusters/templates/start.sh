mkdir -p {{ job.folder | quote }} &&
cp -rL {{ source | quote }}/. {{ job.folder | quote }} &&
cd {{ job.folder | quote }} || exit 1
{% if job.profile.enter %}
{{ job.profile.enter }}
[ $? = 0 ] || exit 1
{% endif %}
exec {{ job.profile.container | before }}python -m areal_lite.launch.clusters.attempts {{ job.record | quote }}
