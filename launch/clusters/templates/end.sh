alive() { tr '\0' '\n' 2>/dev/null < /proc/{{ pid }}/environ | grep -qxF {{ own | quote }}; }
alive || exit 0
kill -{{ signal }} {{ pid }}
for i in $(seq {{ 10 * grace_s }}); do alive || exit 0; sleep 0.1; done
kill -KILL {{ pid }}
