{% if job.profile.enter %}
{{ job.profile.enter }}
[ $? = 0 ] || { echo "ConfigError: enter in the profile must succeed, it failed on $HOSTNAME" >&2; exit 1; }
{% endif %}
