// The browser of sampled groups. Texts are only set as text: what a model wrote is never parsed as markup.
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) key === "style" ? Object.assign(made.style, value) : made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const sourceOf = (group) => String(group.group ?? "").split("/")[0];
const samplesOf = (group) => (Array.isArray(group.samples) ? group.samples : []);
const spansOf = (sample) => (Array.isArray(sample.spans) ? sample.spans : []);
const branchesOf = (sample) => (Array.isArray(sample.branches) ? sample.branches : []);
const versionsOf = (sample) => [...new Set(spansOf(sample).map(([version]) => version))].filter((version) => version !== GIVEN);
const ENDS = { stop: "ended", stop_string: "ended at a stop string", length: "cut off at the token limit" };

const FILTERS = {
  all: () => true,
  mixed: (group) => new Set(samplesOf(group).map((sample) => sample.reward)).size > 1,
  versions: (group) => samplesOf(group).some((sample) => versionsOf(sample).length > 1),
  failures: (group) => samplesOf(group).some((sample) => sample.failure),
  cut: (group) => samplesOf(group).some((sample) => sample.stop_reason === "length"),
  turns: (group) => samplesOf(group).some((sample) => sample.messages),
  branches: (group) => samplesOf(group).some((sample) => branchesOf(sample).length),
};

// The text has no token borders: they are exact for a single version or a character tokenizer, and else estimated.
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
    title: version === GIVEN ? `tokens ${start}-${end - 1}: from the environment` : `tokens ${start}-${end - 1}: version ${version}`,
  })));
}

// The versions that wrote each of the model's turns; given spans separate the turns.
function turns(sample) {
  const written = [[]];
  for (const [version] of spansOf(sample)) version === GIVEN ? written.push([]) : written.at(-1).push(version);
  const runs = written.filter((versions) => versions.length), own = sample.messages.filter(({ role }) => role === "assistant");
  return sample.messages.map((message) => {
    const isOwn = message.role === "assistant", versions = (isOwn && runs.length === own.length && runs[own.indexOf(message)]) || [];
    const about = versions.length ? { title: `version ${versions.join(", ")}`, style: { borderColor: versionColour(versions[0]) } } : {};
    return element("div", { class: isOwn ? "turn" : "turn given", ...about }, element("small", {}, message.role), String(message.content));
  });
}

const figures = (values) => Object.entries(values).map(([name, value]) => `${name} ${Number(value).toPrecision(3)}`).join(", ");
const line = (words) => element("div", { class: "more" }, words);

// Length, how it ended, versions with their age at the step that trained it; then the text.
function describe(sample, step, first) {
  const written = versionsOf(sample).map((version) => `version ${version} (age ${step - 1 - version})`);
  const about = [sample.tokens === 1 ? "1 token" : `${sample.tokens} tokens`, ENDS[sample.stop_reason] ?? sample.stop_reason, ...written].map((words) => element("span", {}, words));
  const [parts, isExact] = colouredText(sample);
  const note = isExact || sample.messages ? [] : [line("borders between versions in the text are estimated from token counts")];
  const text = element("div", { class: "text" }, ...(sample.messages ? turns(sample) : parts));
  return [element("header", {}, first, ...about), strip(sample), text, ...note];
}

function answer(sample, best, step) {
  const reward = sample.failure ? `failed: ${sample.failure}` : `reward ${sample.reward === null ? "none" : Number(sample.reward).toPrecision(3)}`;
  const tone = sample.failure ? "low" : sample.reward === best ? "high" : "";
  const more = [];
  if (sample.parts) more.push(`parts: ${figures(sample.parts)}`);
  if (sample.metrics) more.push(`figures: ${figures(sample.metrics)}`);
  if (sample.step_rewards) more.push(`step rewards: ${sample.step_rewards.map(([token, value]) => `${value} at token ${token}`).join(", ")}`);
  if (sample.feedback) more.push(`feedback: ${sample.feedback}`);
  const branches = branchesOf(sample).map((branch, index) => element("div", { class: "branch" }, ...describe(branch, step, element("b", {}, `branch ${index + 1}`))));
  return element("div", { class: "answer" }, ...describe(sample, step, element("b", { class: tone }, reward)), ...more.map(line), ...branches);
}

function legend(group) {
  const ways = samplesOf(group).flatMap((sample) => [sample, ...branchesOf(sample)]);
  const all = [...new Set(ways.flatMap((sample) => spansOf(sample).map(([version]) => version)))].sort((a, b) => a - b);
  return element("div", { class: "legend" }, ...all.map((version) => element(
    "span", {}, element("i", { style: { background: versionColour(version) } }), version === GIVEN ? "from the environment" : `version ${version}`,
  )), element("span", {}, "green: the best reward of a group that differs; red: failed; strip: tokens by version"));
}

function showGroup(group, where) {
  document.getElementById("sample-where").textContent = where;
  const place = document.getElementById("sample-group");
  if (!group) return place.replaceChildren("no sampled group matches");
  const prompt = element("div", { class: "prompt" }, String(group.prompt ?? ""));
  const expected = group.answer ? [line(`reference answer: ${group.answer}`)] : [];
  const rewards = samplesOf(group).map((sample) => sample.reward).filter((reward) => reward !== null);
  const best = new Set(rewards).size > 1 ? Math.max(...rewards) : undefined;
  const answers = element("div", { class: "answers" }, ...samplesOf(group).map((sample) => answer(sample, best, group.step)));
  place.replaceChildren(prompt, ...expected, legend(group), answers);
  fill(answers);
}

function startSamples() {
  const at = document.getElementById("sample-step"), filter = document.getElementById("sample-filter"), source = document.getElementById("sample-source");
  const sources = ["all", ...new Set(DATA.samples.map(sourceOf))];
  source.append(...sources.map((name) => element("option", { value: name }, name)));
  let steps = [], place = 0, last = Infinity;
  const show = () => {
    const [step, groups] = steps[at.value] ?? [], group = groups?.[(place = Math.max(0, Math.min(place, groups.length - 1)))];
    last = step ?? last;
    showGroup(group, group ? `step ${step} of ${DATA.samples.at(-1).step}, group ${place + 1} of ${groups.length}: ${group.group}` : "");
  };
  const choose = () => {
    const chosen = DATA.samples.filter((group) => FILTERS[filter.value](group) && (source.value === "all" || sourceOf(group) === source.value));
    steps = [...new Set(chosen.map((group) => group.step))].map((step) => [step, chosen.filter((group) => group.step === step)]);
    at.max = Math.max(0, steps.length - 1);
    at.value = steps.findLastIndex(([step]) => step <= last);
    show();
  };
  at.addEventListener("input", show);
  filter.addEventListener("change", choose);
  source.addEventListener("change", choose);
  document.getElementById("sample-bar").addEventListener("click", (event) => {
    const [what, way] = (event.target.dataset.do ?? "").split("-"), move = way === "on" ? 1 : -1;
    if (what === "step") at.value = Number(at.value) + move;
    if (what === "group") place += move;
    if (what) show();
  });
  choose();
}
