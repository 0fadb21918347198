// Whether Python is still there, and what the explorer does once it is not: it says so, and goes on with what it was sent to keep.

const LOOKED = 300; // ms between two looks at the kernel
const AGAIN = "Run the cell again";
const LOST = "The connection to the kernel is lost";
const STAYS = "Sites can no longer be switched or measured; the picture, the inspector, the outline and the search still work.";

// What became of Python, in words; "" while it is there, however busy it is. Jupyter's manager tells of the kernel; the model of our layout,
// which Jupyter makes beside ours, tells what anywidget's stand-in for ours does not. Elsewhere neither is there, and nothing is told.
function absence(model, first) {
  const beside = model.get("layout"), kernel = model.widget_manager?.kernel;
  if (beside?.comm_live === undefined) return "";
  const context = model.widget_manager?.context?.sessionContext; // tells what was asked for, a moment before it is so
  const known = beside.comm && kernel?.hasComm ? kernel.hasComm(beside.comm.comm_id) : true;
  if (beside.comm_live && kernel !== null && !kernel?.isDisposed && known && !context?.isTerminating && !context?.isRestarting) {
    return ["connecting", "disconnected"].includes(kernel?.connectionStatus) ? LOST : "";
  }
  if (first.saved) return "This saved explorer has no kernel";
  if (!kernel || kernel.isDisposed || context?.isTerminating) return "The kernel was shut down";
  if (kernel.id !== first.kernel) return "The notebook now has another kernel";
  return kernel.status === "autorestarting" ? "The kernel died" : "The kernel was restarted";
}

// The store of a widget while its kernel lives, and that of a record from then on. A connection that comes back brings the kernel back.
function keptStore(model) {
  const live = widgetStore(model), watchers = new Map(), listeners = new Set(), sides = {};
  const first = { kernel: model.widget_manager?.kernel?.id, saved: model.get("layout")?.comm_live === false };
  let record = null, why = "", closed = false;
  const all = () => { for (const each of watchers.values()) for (const f of each) f(); };
  const recorded = () => {
    const now = Object.fromEntries([...watchers.keys()].map((name) => [name, structuredClone(live.get(name) ?? null)]));
    const lost = why === LOST, shown = now.head?.shown ?? "before";
    sides[shown] ??= { scene: now.scene };
    const stale = Object.values(sides).some((s) => s.index && s.decided !== now.head?.decided);
    const off = lost ? `${why}: off until it is back.` : `${why}: off. ${AGAIN}.`;
    const can = { export: [".svg", ".png"], outline: sides[shown].index !== undefined, after: "after" in sides, both: "both" in sides };
    if (now.tabs) now.tabs = now.tabs.map((t) => (t.empty && t.html.includes("press Measure") ? { ...t, html: '<p class="quiet">Nothing was measured.</p>' } : t));
    Object.assign(now, { busy: { running: false, status: why }, problem: null, outline: sides[shown].outline ?? now.outline ?? {},
      head: { ...now.head, can, offline: off, gone: { what: why, lost, stale, bare: !Object.values(sides).some((s) => s.index) } } });
    return recordStore(now, sides, lost ? "It opens once the connection is back." : `${AGAIN} to see it.`);
  };
  const look = () => {
    if (why && why !== LOST) return; // who is gone stays gone
    const now = closed ? "The explorer was closed from Python" : absence(model, first);
    if (now === why) return;
    why = now;
    record = why ? recorded() : null;
    for (const [name, each] of record ? watchers : []) for (const f of each) record.on(name, f);
    for (const f of record ? listeners : []) record.on_custom(f);
    all();
  };
  const close = () => { closed = true; look(); };
  const quiet = live.on_custom((message) => { if (message?.type === "kept") [sides[message.side], live.kept] = [message.data, true]; });
  model.on("comm:close", close);
  model.on("comm_live_update", look);
  const timer = setInterval(look, LOOKED);
  return {
    get: (name) => (record || live).get(name),
    set: (name, value) => (record || live).set(name, value),
    on: (name, f) => { live.on(name, f); watchers.set(name, (watchers.get(name) || new Set()).add(f)); },
    off: (name, f) => { live.off(name, f); watchers.get(name)?.delete(f); },
    send: (message) => (record || live).send(message),
    on_custom: (f) => { listeners.add(f); const quiet = live.on_custom(f); return () => { listeners.delete(f); quiet(); }; },
    answers: (type) => !record || record.answers(type),
    closed: () => closed,
    kept: () => !!live.kept,
    end: () => {
      clearInterval(timer);
      quiet();
      model.off("comm:close", close);
      model.off("comm_live_update", look);
    },
    look,
  };
}

// What stands under the top once Python is gone.
function gone(ui) {
  const el = h("div", { class: "fl-problem fl-gone", "data-fl": "gone", role: "alert", hidden: true });
  return { el, draw: { head({ gone: told }) {
    el.hidden = !told;
    const stays = told?.bare ? "Sites cannot be switched or measured; the picture stays." : STAYS;
    fill(el, told && h("b", {}, `${told.what}.`), told && h("span", {}, told.lost ? "Switching and measuring work again once it is back." : `${stays} ${AGAIN} for a live explorer.`),
      told?.stale && h("span", {}, "Cards opened now show the sites as they were before the last change."));
  } } };
}

// Jupyter takes the view of a closed widget away, and hides the output it stood in: the explorer moves into what is still seen around it.
function stay(el, root, end) {
  const around = [el];
  for (let e = el.parentElement; e; e = e.parentElement) around.push(e);
  const move = () => {
    if (root.isConnected && root.getClientRects().length) return;
    const k = around.findIndex((e) => e.isConnected && e.getClientRects().length);
    if (k < 1) return;
    // As wide as what was there, beside a copy of what stood beside it (the prompt of the output).
    const shell = (inner, e) => [e.previousElementSibling?.cloneNode(), h("div", { class: e.className.replace("lm-mod-hidden", "") }, ...[inner].flat())].filter(Boolean);
    const place = around[k - 1].parentElement === around[k] ? around[k - 1].nextSibling : null;
    around[k].insertBefore(around.slice(0, k).reduce(shell, root).at(-1), place);
  };
  for (const ms of [0, 50, 250]) setTimeout(move, ms);
  const left = setInterval(() => { if (!root.isConnected) [clearInterval(left), end()]; }, 1000); // the cell was run again, or deleted
}

function renderWidget({ model, el }) {
  const store = keptStore(model), unmount = mount(el, store), root = el.lastElementChild;
  store.look();
  root.flKept = store.kept; // whether the browser could go on without Python now
  model.send({ type: "keep" });
  return () => {
    const end = () => { store.end(); unmount(); };
    if (store.closed()) stay(el, root, end);
    else end();
  };
}
