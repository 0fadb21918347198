// The bar below the graph: what runs, for how long and how long yet, what stops it, and what can be measured.

const TICK = 500; // ms; a clock that shows whole seconds and is never late by one

const clockText = (s) => (s < 60 ? `${Math.floor(s)} s` : `${Math.floor(s / 60)} min ${String(Math.floor(s % 60)).padStart(2, "0")} s`);

function measuring(ui) {
  const status = h("span", { "data-fl": "status", role: "status", class: "fl-status" });
  const clock = h("span", { "data-fl": "clock", class: "fl-clock", "aria-hidden": "true" }); // not said every second
  const progress = h("progress", { "data-fl": "progress", hidden: true, "aria-label": "measuring" });
  const which = h("span", { class: "fl-which" });
  const measure = button("measure", "Measure", { type: "measure" }, { class: "fl-go" }), cancel = button("cancel", "Cancel", { type: "cancel" }, { hidden: true });
  const el = h("div", { class: "fl-run" }, progress, status, clock, which, measure, cancel);
  let now = {}, began = null, zero = 0, told = 0, timer = 0;

  // Python says once since when a stage runs, and how long it may take; from there on it is counted here.
  const tick = () => {
    const at = performance.now(), left = now.left == null ? 0 : now.left - (at - told) / 1000;
    const text = `${clockText(Math.max(0, (at - zero) / 1000))}${left >= 1 ? `, about ${clockText(left)} left` : ""}`;
    if (clock.textContent !== text) clock.textContent = text;
  };
  const run = (busy) => {
    const opened = began === null ? Date.now() / 1000 - busy.began : 0; // shown while it runs already
    told = performance.now() - 1000 * Math.max(0, opened - busy.seconds || 0);
    if (busy.began !== began) zero = performance.now() - 1000 * Math.max(busy.seconds || 0, opened || 0);
    began = busy.began ?? null;
    if (!timer) timer = setInterval(tick, TICK);
    tick();
  };
  const rest = () => {
    clearInterval(timer);
    timer = 0;
    began = undefined;
    clock.textContent = "";
  };
  const free = () => { // what would end what runs waits for its end
    const running = !!ui.store.get("busy")?.running;
    for (const b of ui.root.querySelectorAll('[data-fl="rates"], [data-fl="scopes"], [data-fl="which"], [data-fl="tune"]')) {
      b.disabled = running || ui.fixed();
      b.title = ui.fixed() ? ui.why() : running ? "something is being measured" : b.dataset.why || "";
    }
  };
  ui.abort.signal.addEventListener("abort", rest);
  return { el, draw: {
    tabs: free,
    head() {
      const { counts, can = {} } = ui.head(), faults = can.which || [];
      const why = ui.head().gone ? ui.why() : !can.measure ? `there is only a graph here; measuring it ${LIVE}` : counts?.applied === 0 ? "no site is on: before and after are the same program" : "";
      el.hidden = ui.fixed() && !ui.head().gone;
      [measure.disabled, measure.title] = [!!why, why || "measure the program before and after fusing these sites"];
      fill(which, can.blame && faults.map((of) => button("which", faults.length > 1 ? `Which site is ${of === "time" ? "slower" : "worse"}?` : "Which site?", { type: "which", of },
        { "data-key": of, "data-why": `search the sites that are on, half by half, for those that make it ${of === "time" ? "slower" : "worse"}` })));
      free();
    },
    busy(busy = {}) {
      const { running = false, what = "", done = 0, total = 0, status: said = "" } = (now = busy);
      const text = running ? `${what}${total ? ` ${done}/${total}` : ""}` : said;
      if (status.textContent !== text) status.textContent = text;
      status.title = running && busy.cancel === false ? `${text}: interrupt the kernel to stop it` : text;
      progress.hidden = !running;
      if (total) [progress.max, progress.value] = [total, done];
      else progress.removeAttribute("value");
      if (!running && focused(cancel)) measure.focus();
      cancel.hidden = !running || busy.cancel === false;
      if (running && busy.began) run(busy);
      else rest();
      free();
    },
  } };
}
