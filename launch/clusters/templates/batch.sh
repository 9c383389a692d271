#!/bin/bash
{# What a batch system runs. `options`: its own lines; USR1 comes before the time limit, INT asks to stop, TERM cancels. #}
{% block options %}
{% endblock %}

{% include "enter.sh" %}
{% block began %}
{% endblock %}
asked=no
{% if self.requeue() | trim and job.run_folder %}
saved() { cat {{ job.run_folder | quote }}/checkpoints/step-*/meta.json 2>/dev/null; }
before=$(saved)
{% endif %}
trap '[ $asked = stop ] || asked=end; kill -TERM "$supervisor"' USR1 # the time limit is near, or a preemption
trap 'asked=stop; kill -TERM "$supervisor"' INT                       # asked to stop
trap 'asked=${asked/no/stop}; kill -TERM "$supervisor"' TERM         # cancelled, or requeued
{{ python }} -P -m areal_lite.launch.clusters.attempts {{ job.record | quote }} &
supervisor=$!
# A signal ends a wait, not the supervisor.
while wait "$supervisor"; code=$?; kill -0 "$supervisor" 2>/dev/null; do :; done
wait "$supervisor"; code=$?
{% if self.requeue() | trim and job.run_folder %}
# A preemption may signal the steps alone: the run then saves and ends by itself. A new checkpoint shows that.
if [ "$asked" != stop ] && [ "$code" = 130 ]; then
    [ "$asked" = end ] && before=
    if [ "$(saved)" != "$before" ]; then
        echo "{{ system }} wants the nodes: back into the queue, to resume from the latest checkpoint"
        {%+ block requeue %}{% endblock %}

    else
        echo "{{ system }} wanted the nodes before a step was saved: ask for more time ({{ time }} in the profile)"
    fi
fi
{% endif %}
exit "$code"
