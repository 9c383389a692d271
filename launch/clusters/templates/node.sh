cd {{ job.folder | quote }} || exit 1
{% if job.env_file %}
. {{ job.env_file | quote }} || exit 1
{% endif %}
{% for name, value in env.items() %}
export {{ name }}={{ value | quote }}
{% endfor %}
{% include "enter.sh" %}
{% block first %}
{% endblock %}
echo "areal-lite pid $$"
exec {% block command %}{{ command | join(" ") }}{% endblock %} < /dev/null
