// The chart library is compressed, which makes the page a third as large.
async function unpacked(packed) {
  const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function start() {
  document.querySelectorAll("table.sortable th").forEach((heading) => {
    const button = element("button", {}, heading.textContent);
    button.addEventListener("click", () => sortBy(heading.closest("table"), heading.cellIndex));
    heading.replaceChildren(button);
  });
  if (DATA.samples) startSamples();
  fillAll();
  follow();
  addEventListener("scroll", follow, { passive: true });
  addEventListener("resize", fillAll);
  document.getElementById("axis")?.addEventListener("change", () => drawCharts());
  document.querySelectorAll("details.part").forEach((part) => part.addEventListener("toggle", () => unfold(part)));
  document.querySelector("nav").addEventListener("click", ({ target }) => {
    const part = target.hash && document.querySelector(`${target.hash} > details.part`);
    if (part) part.open = true;
  });
  document.head.append(element("script", {}, await unpacked(document.getElementById("plotly").textContent)));
  drawCharts();
  if (DATA.timeline) startTimeline();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => onPaper(true));
  addEventListener("afterprint", () => onPaper(false));
}

start();
