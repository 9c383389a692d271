cd {{ job.folder | quote }} || exit 1
{% for name, value in env.items() %}
export {{ name }}={{ value | quote }}
{% endfor %}
{% if job.profile.enter %}
{{ job.profile.enter }}
{% endif %}
{% block first %}
{% endblock %}
echo "areal-lite pid $$"
exec {{ job.profile.container | before }}{% block command %}{{ command | join(" ") }}{% endblock %} < /dev/null
