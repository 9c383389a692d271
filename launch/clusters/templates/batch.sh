#!/bin/bash
{# What a batch system runs. `options`: its own lines; USR1 comes before the time limit, INT asks to stop, TERM cancels. #}
{% block options %}
{% endblock %}

{{ job.profile.enter or ":" }}
{% block began %}
{% endblock %}
told=no started=$(date +%s)
trap '[ $told = stop ] || told=end; kill -TERM "$supervisor"' USR1 # the time limit is near, or a preemption
trap 'told=stop; kill -TERM "$supervisor"' INT                     # asked to stop
trap 'told=${told/no/stop}; kill -TERM "$supervisor"' TERM         # cancelled, or requeued
{{ python }} -m areal_lite.launch.clusters.attempts {{ job.record | quote }} &
supervisor=$!
# A signal ends a wait, not the supervisor.
while wait "$supervisor"; code=$?; kill -0 "$supervisor" 2>/dev/null; do :; done
wait "$supervisor"; code=$?
{% if self.requeue() | trim and job.run_folder %}
# Where a preemption leaves time, the steps alone are told, and the run saves and ends by itself: by what it has saved.
if [ "$told" != stop ] && [ "$code" = 130 ]; then
    [ "$told" = end ] && started=0
    if [ -n "$(find {{ job.run_folder | quote }}/checkpoints/step-*/meta.json -newermt "@$started" 2>/dev/null)" ]; then
        echo "{{ system }} wants the nodes: back into the queue, to go on from the newest checkpoint"
        {%+ block requeue %}{% endblock %}

    else
        echo "{{ system }} wanted the nodes before a step was saved: ask for more time ({{ time }} in the profile)"
    fi
fi
{% endif %}
exit "$code"
