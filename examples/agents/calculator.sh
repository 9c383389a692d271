#!/bin/sh
# The agent of calculator.py as a program: curl asks the model, expr is the calculator.
# It reads the task as one line of JSON, and prints its reward as its last line.

value() { sed "s/.*\"$1\": *\"\([^\"]*\)\".*/\1/"; }

read -r task
text=$(printf %s "$task" | value prompt)
answer=$(printf %s "$task" | value answer)
for call in 1 2 3 4 5 6 7 8; do
  reply=$(curl --silent --show-error --fail-with-body "$OPENAI_BASE_URL/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    --json "{\"model\": \"$OPENAI_MODEL\", \"prompt\": \"$text\"}") || { echo "$reply" >&2; exit 1; }
  text="$text$(printf %s "$reply" | value text)"
  question=$(printf %s "$text" | sed -n 's/.*[^0-9]\([0-9][0-9]*+[0-9][0-9]*\)?$/\1/p')
  [ "$question" ] || break
  text="$text$(expr "${question%+*}" + "${question#*+}")"
done
[ "${text##*#}" = "$answer" ] && echo 1 || echo 0
