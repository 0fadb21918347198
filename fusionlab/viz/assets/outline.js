// The left panel: passes and outline as two tabs, and the outline itself, the cards of the picture as a tree with the same selection.

const SIDE_KEPT = "fusionlab-side"; // where the browser remembers the tab
const ROOM = 168; // px that a line of a narrow panel has for what is between its sign and its share
const WORDS = { applied: "fused", candidate: "can be fused", declined: "declined" };

// What a browser remembers; nothing where a page may not.
const remembered = (key) => { try { return localStorage.getItem(key); } catch { return null; } };
const remember = (key, value) => { try { localStorage.setItem(key, value); } catch { /* it is chosen for this page alone */ } };

// `parts` is { name: { el, why } }: `why()` says why a tab has nothing to show, "" where it has. Each `el` becomes a panel.
function sidePanel(ui, parts) {
  const names = Object.keys(parts);
  const list = h("div", { class: "fl-sidetabs", role: "tablist", "aria-label": "left panel" });
  const el = h("div", { class: "fl-sides" }, list, names.map((name) => parts[name].el));
  const kept = remembered(SIDE_KEPT);
  let active = names.includes(kept) ? kept : names[0];
  const id = (name) => `${ui.uid}-side-${name}`;
  for (const name of names) {
    for (const [key, value] of Object.entries({ id: id(name), role: "tabpanel", "aria-labelledby": `${id(name)}-tab`, "data-fl-panel": name })) parts[name].el.setAttribute(key, value);
  }
  const draw = () => {
    const shown = parts[active].why() ? names[0] : active;
    fill(list, names.map((name) => h("button", { type: "button", role: "tab", id: `${id(name)}-tab`, "data-fl-side": name, "data-key": name, "aria-controls": id(name), "aria-selected": String(name === shown),
      tabindex: name === shown ? "0" : "-1", disabled: !!parts[name].why(), title: parts[name].why() }, name)));
    for (const name of names) parts[name].el.hidden = name !== shown;
    parts[shown].shown?.();
  };
  const choose = (name) => {
    active = name;
    remember(SIDE_KEPT, name);
    draw();
    list.querySelector('[aria-selected="true"]').focus();
  };
  ui.on(list, "click", (e) => { if (e.target.dataset.flSide) choose(e.target.dataset.flSide); });
  ui.on(list, "keydown", (e) => {
    const may = names.filter((name) => !parts[name].why()), at = may.indexOf(active), n = may.length;
    const to = { ArrowRight: (at + 1) % n, ArrowLeft: (at + n - 1) % n, Home: 0, End: n - 1 }[e.key];
    if (to === undefined) return;
    e.preventDefault();
    choose(may[to]);
  });
  return { el, draw: { outline: draw, head: draw } };
}

// The tree. A line tells its name, its sites and its share; what is inside a card is there when it is opened.
function outline(ui) {
  const opened = new Map(), asked = new Set(); // what the reader, or a selection, opened or closed; what is told because it was asked for
  const scale = h("button", { type: "button", class: "fl-link fl-scale", "data-fl": "outline-scale" });
  const tree = h("div", { class: "fl-tree", role: "tree", "data-fl": "outline", "aria-label": "outline" });
  const el = h("section", { class: "fl-outline", "aria-label": "outline" }, h("div", { class: "fl-treehead" }, scale), tree);
  let counted = false, current = null, marked = null, followed = null, lines = new Map();

  const told = () => ui.store.get("outline") || {};
  const unit = () => told().unit || "bytes", by = () => (counted ? "operations" : unit());
  const steps = () => ui.store.get("trail") || [];
  const why = () => (told().line ? "" : "this picture has no outline");
  const inside = (line) => (line.inside && (line.lines || !ui.fixed() || ui.can("outline")) ? line.inside : 0);
  const isOpen = (line, depth) => !!inside(line) && (opened.get(line.id) ?? depth < 2);
  const name = (line) => [line.prefix, line.name, line.count && `×${line.count}`].filter(Boolean).join(" ");
  const share = (line) => line[by()]?.[1] || "";
  const strips = (line) => (line.strips || []).map(([pass, state, n, backward]) => `${n.toLocaleString()} ${pass}${backward ? ", backward," : ""} ${WORDS[state] || state}`);
  const spoken = (line) => [name(line), `${line[by()][0]}${share(line) ? `, ${share(line)} of ${by()}` : ""}`, ...strips(line)].join("; ");

  // The lines to be seen, from above: { line, depth, at, of, parent }.
  const flat = (line, depth = 0, at = 1, of = 1, parent = null, found = []) => {
    found.push({ line, depth, at, of, parent });
    const all = isOpen(line, depth) ? line.lines || [] : [];
    all.forEach((child, k) => flat(child, depth + 1, k + 1, all.length, line.id, found));
    return found;
  };
  // Whether a line is longer than a narrow panel: its numbers are then told by its title alone, so that its name can be read.
  const long = (line, depth) => depth * 11 + line.name.length * 6.3 + (line.count ? 28 : 0) + (line.strips || []).reduce((sum, strip) => sum + 19 + 6 * String(strip[2]).length, 0) > ROOM;
  const swatch = ([pass, state, n, backward]) => h("span", { class: "fl-bit" },
    h("span", { class: `fl-swatch ${state}${backward ? " backward" : ""}`, style: `--pass:${told().colours?.[pass]}` }), h("span", {}, n.toLocaleString()));
  const row = ({ line, depth, at, of }) => {
    const open = isOpen(line, depth), says = spoken(line), closed = line.inside && !inside(line) ? `; opening it ${ui.why()}` : "";
    return h("div", { role: "treeitem", class: `fl-line${depth ? "" : " fl-whole"}${long(line, depth) ? " fl-long" : ""}`, "data-line": line.id, "data-key": line.id || "-", style: `--depth:${depth}`, "aria-level": depth + 1, "aria-posinset": at, "aria-setsize": of,
      "aria-expanded": inside(line) ? String(open) : null, "aria-selected": String(line.id === marked), "aria-label": says, title: says + closed, tabindex: line.id === current ? "0" : "-1" },
    h("span", { class: "fl-turn", "aria-hidden": "true" }, inside(line) ? (open ? "▾" : "▸") : ""),
    h("span", { class: "fl-called", "aria-hidden": "true" }, line.prefix && h("span", { class: "fl-quiet fl-prefix" }, `${line.prefix} `), line.name),
    line.count && h("span", { class: "fl-times", "aria-hidden": "true" }, `×${line.count}`),
    h("span", { class: "fl-strips", "aria-hidden": "true" }, (line.strips || []).map(swatch)),
    h("span", { class: "fl-part", "aria-hidden": "true" }, share(line) || "–"));
  };
  const redraw = () => {
    if (!told().line) return fill(tree);
    const all = flat(told().line);
    lines = new Map(all.map((one) => [one.line.id, one]));
    if (!lines.has(current)) current = lines.has(marked) ? marked : "";
    fill(tree, all.map(row));
    fill(scale, `share of ${by()}`);
    scale.title = `show the share of ${counted ? unit() : "operations"}`;
  };
  const element = (id) => [...tree.children].find((e) => e.dataset.line === id);
  const walk = (id) => {
    current = id;
    redraw();
    const now = element(id);
    now?.focus({ preventScroll: true });
    bring(now);
  };
  const bring = (e) => { // within the tree alone: the page stays where it is
    if (!e || !tree.clientHeight) return;
    const [top, bottom] = [e.offsetTop - tree.offsetTop, e.offsetTop - tree.offsetTop + e.offsetHeight];
    if (top < tree.scrollTop) tree.scrollTop = top - 4;
    else if (bottom > tree.scrollTop + tree.clientHeight) tree.scrollTop = bottom - tree.clientHeight + 4;
  };
  const turn = (id, open) => {
    const { line } = lines.get(id);
    if (!inside(line)) return;
    opened.set(id, open);
    if (open && !line.lines) ui.store.send({ type: "outline", id });
    redraw();
  };
  const choose = (id) => {
    walk(id);
    ui.visit(id);
  };
  // The line of what is selected, or of what it lies in; the lines around it are opened, and what is not told yet is asked for.
  const follow = () => {
    if (!told().line) return redraw();
    const way = steps().map((step) => step.id), selected = way.length > 1 ? way.at(-1) : null, other = selected !== followed;
    if (other) for (const id of way.slice(0, -1)) opened.set(id, true);
    followed = selected;
    const found = new Map(flat(told().line).map((one) => [one.line.id, one.line]));
    marked = selected === null ? null : way.findLast((id) => found.has(id)) ?? null;
    if (other && !tree.contains(ui.root.getRootNode().activeElement)) current = marked ?? current;
    redraw();
    if (other) bring(element(marked));
    const last = found.get(marked);
    if (marked === selected || !last || !inside(last) || last.lines || asked.has(marked)) return;
    asked.add(marked);
    ui.store.send({ type: "outline", id: marked });
  };
  ui.on(scale, "click", () => { counted = !counted; redraw(); });
  ui.on(tree, "click", (e) => {
    const line = e.target.closest("[data-line]");
    if (!line) return;
    const { line: told, depth } = lines.get(line.dataset.line);
    if (e.target.closest(".fl-turn") && inside(told)) [walk(told.id), turn(told.id, !isOpen(told, depth))];
    else choose(told.id);
  });
  ui.on(tree, "dblclick", (e) => {
    const one = lines.get(e.target.closest("[data-line]")?.dataset.line);
    if (one && !e.target.closest(".fl-turn")) turn(one.line.id, !isOpen(one.line, one.depth));
  });
  ui.on(tree, "keydown", (e) => {
    const all = [...lines.keys()], at = all.indexOf(current), one = lines.get(current);
    if (!one || e.ctrlKey || e.metaKey || e.altKey) return;
    const open = isOpen(one.line, one.depth), child = open && one.line.lines?.[0]?.id;
    const act = {
      ArrowDown: () => walk(all[Math.min(at + 1, all.length - 1)]), ArrowUp: () => walk(all[Math.max(at - 1, 0)]), Home: () => walk(all[0]), End: () => walk(all.at(-1)),
      ArrowRight: () => (open ? child && walk(child) : turn(current, true)), ArrowLeft: () => (open ? turn(current, false) : one.parent !== null && walk(one.parent)),
      Enter: () => choose(current), " ": () => turn(current, !open),
    }[e.key];
    if (!act) return;
    e.preventDefault();
    act();
  });
  return { el, why, shown: () => bring(element(marked)), draw: { outline: follow, trail: follow, head: redraw } };
}
