// The browser of sampled groups. Texts are only ever set as text: what a model wrote is never read as markup.
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) key === "style" ? Object.assign(made.style, value) : made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const sourceOf = (group) => String(group.group ?? "").split("/")[0];
const samplesOf = (group) => (Array.isArray(group.samples) ? group.samples : []);
const spansOf = (sample) => (Array.isArray(sample.spans) ? sample.spans : []);
const versionsOf = (sample) => [...new Set(spansOf(sample).map(([version]) => version))].filter((version) => version !== GIVEN);

const FILTERS = {
  all: () => true,
  mixed: (group) => new Set(samplesOf(group).map((sample) => sample.reward)).size > 1,
  versions: (group) => samplesOf(group).some((sample) => versionsOf(sample).length > 1),
  failures: (group) => samplesOf(group).some((sample) => sample.failure),
  turns: (group) => samplesOf(group).some((sample) => sample.messages),
};

// A text has no token borders. They are exact for one version, and for a tokenizer of characters; else in proportion.
function colouredText(sample) {
  const spans = spansOf(sample).filter(([version]) => version !== GIVEN);
  const text = String(sample.text ?? "");
  if (versionsOf(sample).length < 2) return [[element("span", { style: { borderColor: versionColour(spans[0]?.[0] ?? GIVEN) } }, text)], true];
  const characters = Array.from(text);
  const isExact = characters.length === sample.tokens || characters.length === sample.tokens - 1;
  const scale = isExact ? 1 : characters.length / sample.tokens;
  const parts = spans.map(([version, start, end]) => element(
    "span", { style: { borderColor: versionColour(version) }, title: `version ${version}` },
    characters.slice(Math.round(start * scale), end >= sample.tokens ? undefined : Math.round(end * scale)).join(""),
  ));
  return [parts, isExact];
}

function strip(sample) {
  return element("div", { class: "strip" }, ...spansOf(sample).map(([version, start, end]) => element("i", {
    style: { background: versionColour(version), flexGrow: end - start },
    title: version === GIVEN ? `tokens ${start}-${end - 1}: given by the environment` : `tokens ${start}-${end - 1}: version ${version}`,
  })));
}

function turns(sample) {
  return sample.messages.map(({ role, content }) => element(
    "div", { class: role === "assistant" ? "turn" : "turn given" }, element("small", {}, role), String(content),
  ));
}

const figures = (values) => Object.entries(values).map(([name, value]) => `${name} ${Number(value).toPrecision(3)}`).join(", ");

function answer(sample, best) {
  const reward = sample.failure ? `failed: ${sample.failure}` : `reward ${sample.reward === null ? "none" : Number(sample.reward).toPrecision(3)}`;
  const tone = sample.failure ? "low" : sample.reward === best ? "high" : "";
  const versions = versionsOf(sample);
  const about = [`${sample.tokens} tokens`, sample.stop_reason === "length" ? "cut off" : "ended", `version ${versions.join(", ")}`].map((words) => element("span", {}, words));
  const [parts, isExact] = colouredText(sample);
  const text = element("div", { class: "text" }, ...(sample.messages ? turns(sample) : parts));
  const more = [];
  if (!isExact && !sample.messages) more.push("borders between versions in the text are in proportion to tokens");
  if (sample.parts) more.push(`parts: ${figures(sample.parts)}`);
  if (sample.metrics) more.push(`figures: ${figures(sample.metrics)}`);
  if (sample.step_rewards) more.push(`step rewards: ${sample.step_rewards.map(([token, value]) => `${value} at token ${token}`).join(", ")}`);
  if (sample.feedback) more.push(`feedback: ${sample.feedback}`);
  const head = element("header", {}, element("b", { class: tone }, reward), ...about);
  return element("div", { class: "answer" }, head, strip(sample), text, ...more.map((words) => element("div", { class: "more" }, words)));
}

function legend(group) {
  const all = [...new Set(samplesOf(group).flatMap((sample) => spansOf(sample).map(([version]) => version)))].sort((a, b) => a - b);
  return element("div", { class: "legend" }, ...all.map((version) => element(
    "span", {}, element("i", { style: { background: versionColour(version) } }), version === GIVEN ? "given by the environment" : `version ${version}`,
  )));
}

function showGroup(group, where) {
  document.getElementById("sample-where").textContent = where;
  const place = document.getElementById("sample-group");
  if (!group) return place.replaceChildren("no such group among the sampled ones");
  const prompt = element("div", { class: "prompt" }, String(group.prompt ?? ""));
  const expected = group.answer ? [element("div", { class: "more" }, `reference answer: ${group.answer}`)] : [];
  const rewards = samplesOf(group).map((sample) => sample.reward).filter((reward) => reward !== null);
  const best = new Set(rewards).size > 1 || rewards[0] > 0 ? Math.max(...rewards) : undefined;
  const answers = element("div", { class: "answers" }, ...samplesOf(group).map((sample) => answer(sample, best)));
  place.replaceChildren(prompt, ...expected, legend(group), answers);
}

function startSamples() {
  const at = document.getElementById("sample-at"), filter = document.getElementById("sample-filter"), source = document.getElementById("sample-source");
  const sources = ["all", ...new Set(DATA.samples.map(sourceOf))];
  source.append(...sources.map((name) => element("option", { value: name }, name)));
  let chosen = [];
  const show = () => {
    const group = chosen[Number(at.value)];
    showGroup(group, group ? `step ${group.step}, ${group.group} (${Number(at.value) + 1} of ${chosen.length})` : "");
  };
  const choose = () => {
    const step = chosen[Number(at.value)]?.step ?? 0;
    chosen = DATA.samples.filter((group) => FILTERS[filter.value](group) && (source.value === "all" || sourceOf(group) === source.value));
    at.max = Math.max(0, chosen.length - 1);
    at.value = Math.max(0, chosen.findIndex((group) => group.step >= step));
    show();
  };
  at.addEventListener("input", show);
  filter.addEventListener("change", choose);
  source.addEventListener("change", choose);
  document.getElementById("sample-bar").addEventListener("click", (event) => {
    const move = { previous: -1, next: 1 }[event.target.dataset.do];
    if (move) { at.value = Number(at.value) + move; show(); }
  });
  choose();
}

if (DATA.samples) startSamples();
