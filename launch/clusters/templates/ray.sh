{% extends "node.sh" %}
{% block first %}
address=$({{ python }} -P -c {{ look_up | quote }}) || exit 1
echo "areal-lite address $address"
{% endblock %}
{% block command %}
{{ python }} -P -m areal_lite.launch.clusters.ray_nodes start
{%- if head %} --address={{ head }}{% else %} --head --include-dashboard=false{% endif %}
 --block --disable-usage-stats --node-ip-address="$address"
{%- set names = [
    "port", "node-manager-port", "object-manager-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port",
    "runtime-env-agent-port", "metrics-export-port", "dashboard-port", "ray-client-server-port",
] %}{# named all, as Ray compares even unused ones with each other #}
{%- set of_head = ["port", "dashboard-port", "ray-client-server-port"] %}
{%- for name in names %}
{%- if not head or name not in of_head %} --{{ name }}={{ ports[loop.index0] }}{% endif %}
{%- endfor %}
 --min-worker-port={{ ports[names | length] }} --max-worker-port={{ ports[-1] }} --num-gpus={{ job.profile.gpus_per_node }}
{%- endblock %}
