// The panels beside the graph: dragged in width, folded into strips, and folded by themselves where the whole is narrow. What is folded
// stays within reach: its strip's button opens it over the graph.

const NARROW = { left: 760, right: 1040 }; // px of the whole below which a panel folds by itself
const LEAST_PANEL = { left: 170, right: 200 }, LEAST_GRAPH = 280, STEP = 16;

// `sides` is { left, right }, each { el, name }. Gives the row of them and the graph between, and what the keys call.
function panels(ui, middle, sides) {
  const asked = { left: null, right: null }; // what the reader wants, at this width of the whole
  const folds = (side) => ui.root.clientWidth > 0 && ui.root.clientWidth < NARROW[side];
  const open = (side) => asked[side] ?? !folds(side);
  const made = Object.fromEntries(Object.entries(sides).map(([side, { el, name }]) => {
    const key = side === "left" ? "[" : "]", arrow = side === "left" ? ["«", "»"] : ["»", "«"];
    el.id = `${ui.uid}-${side}`;
    const grip = h("div", { class: "fl-grip", role: "separator", tabindex: "0", "data-fl": `grip-${side}`, "aria-orientation": "vertical", "aria-controls": el.id,
      "aria-label": `width of the ${name}`, title: `drag, or arrow keys: width of the ${name}` });
    const away = h("button", { type: "button", class: "fl-icon fl-away", "data-fl": `fold-${side}`, "aria-controls": el.id, "aria-expanded": "true",
      "aria-keyshortcuts": key, "aria-label": `fold the ${name}`, title: `fold the ${name} (${key})` }, arrow[0]);
    const about = h("span", { class: "fl-about" });
    const strip = h("button", { type: "button", class: "fl-strip", "data-fl": `open-${side}`, hidden: true, "aria-controls": el.id, "aria-expanded": "false",
      "aria-keyshortcuts": key, "aria-label": `open the ${name}`, title: `open the ${name} (${key})` }, h("span", { "aria-hidden": "true" }, arrow[1]), h("b", {}, name), about);
    const box = h("div", { class: `fl-side fl-${side}` }, away, el);
    return [side, { el, grip, away, strip, box, about, name }];
  }));
  const { left, right } = made;
  const main = h("div", { class: "fl-main" }, left.strip, left.box, left.grip, middle, right.grip, right.box, right.strip);

  const wide = (side) => made[side].box.offsetWidth;
  const most = (side) => {
    const other = side === "left" ? "right" : "left", rest = open(other) && !folds(other) ? wide(other) : 30;
    return Math.max(LEAST_PANEL[side], main.clientWidth - LEAST_GRAPH - (folds(side) ? 60 : rest));
  };
  const size = (side, width) => {
    ui.root.style.setProperty(`--fl-${side}`, `${Math.round(Math.min(most(side), Math.max(LEAST_PANEL[side], width)))}px`);
    place();
  };
  const place = () => {
    for (const [side, { grip, strip, box }] of Object.entries(made)) {
      const shown = open(side), over = shown && folds(side);
      box.hidden = !shown;
      grip.hidden = !shown || over;
      strip.hidden = shown && !over;
      strip.setAttribute("aria-expanded", String(shown));
      box.classList.toggle("fl-over", over);
      if (!shown || over) continue;
      grip.setAttribute("aria-valuemin", LEAST_PANEL[side]);
      grip.setAttribute("aria-valuemax", most(side));
      grip.setAttribute("aria-valuenow", wide(side));
    }
  };
  const set = (side, shown) => {
    const inside = made[side].box.contains(ui.root.getRootNode().activeElement);
    asked[side] = shown;
    const other = side === "left" ? "right" : "left";
    if (shown && folds(side) && folds(other)) asked[other] = null; // one lies over the graph at a time
    place();
    if (inside && !shown) made[side].strip.focus();
    else if (shown && focused(made[side].strip)) made[side].away.focus();
  };
  const toggle = (side) => set(side, !open(side));

  for (const [side, { grip, away, strip, box }] of Object.entries(made)) {
    const way = side === "left" ? 1 : -1;
    ui.on(away, "click", () => set(side, false));
    ui.on(strip, "click", () => toggle(side));
    ui.on(box, "keydown", (e) => { // what lies over the graph goes away as a menu does
      if (e.key !== "Escape" || !box.classList.contains("fl-over")) return;
      e.preventDefault();
      set(side, false);
    });
    let drag = null;
    ui.on(grip, "pointerdown", (e) => {
      if (e.button) return;
      drag = { x: e.clientX, width: wide(side) };
      grip.setPointerCapture?.(e.pointerId);
      e.preventDefault();
      grip.focus({ preventScroll: true });
    });
    ui.on(grip, "pointermove", (e) => { if (drag) size(side, drag.width + way * (e.clientX - drag.x)); });
    for (const end of ["pointerup", "pointercancel"]) ui.on(grip, end, () => { drag = null; });
    ui.on(grip, "keydown", (e) => {
      const to = { ArrowLeft: wide(side) - way * STEP, ArrowRight: wide(side) + way * STEP, Home: LEAST_PANEL[side], End: most(side) }[e.key];
      if (to === undefined && e.key !== "Enter") return;
      e.preventDefault();
      if (e.key === "Enter") set(side, false);
      else size(side, to);
    });
  }
  // A width at which panels fold by themselves or no more takes back what was asked for at another.
  let was = "";
  const resized = new ResizeObserver(() => {
    const now = `${folds("left")} ${folds("right")}`;
    if (was && now !== was) Object.assign(asked, { left: null, right: null });
    was = now;
    place();
  });
  resized.observe(ui.root);
  ui.abort.signal.addEventListener("abort", () => resized.disconnect());
  return { el: main, toggle, place, focus: (side) => (open(side) ? made[side].el : made[side].strip).focus(),
    say: (side, text) => { if (made[side].about.textContent !== text) made[side].about.textContent = text; } };
}

// How high the graph may be for the sentence on top and the bar with Measure to be in sight at once: the height of what scrolls, less both.
function room(ui, above, below) {
  let scroller = null; // known once the whole stands in the page
  const set = () => {
    if (!ui.root.isConnected) return;
    if (!scroller?.contains(ui.root)) {
      scroller = ui.root.closest(".jp-WindowedPanel-outer") || ui.root.closest(".jp-Notebook") || document.documentElement;
      resized.observe(scroller);
    }
    const high = scroller === document.documentElement ? innerHeight : scroller.clientHeight;
    ui.root.style.setProperty("--fl-room", `${high - above.offsetHeight - below.offsetHeight}px`);
  };
  const resized = new ResizeObserver(set);
  for (const e of [above, below]) resized.observe(e);
  ui.on(window, "resize", set);
  ui.abort.signal.addEventListener("abort", () => resized.disconnect());
}
