// Stands in for Python where there is none: answers the explorer's messages from a record that Python made (`record_data`). The standalone
// page holds one; an explorer in a notebook is sent one while its kernel lives.
const own = (all, name) => (Object.hasOwn(all, name) ? all[name] : undefined);
const PAGE = 60; // hits that the list shows at once

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// What the inspector says while nothing is selected.
const idle = (record) => ({ name: "", title: record?.title || "", html: record?.dearest || "" });

// Rows of (name, text, monospaced) as HTML; texts enter as text.
function rowsHtml(rows) {
  const list = document.createElement("dl");
  for (const [key, text, mono] of rows) {
    list.append(Object.assign(document.createElement("dt"), { textContent: key }));
    list.append(Object.assign(document.createElement("dd"), { textContent: text, className: mono ? "mono" : "" }));
  }
  return list.outerHTML;
}

// `traits` are those that are drawn at first. `sides` is { before, after, ... }: which program is shown -> { scene } with its picture, every
// card closed, and the record of it, if there is one; without any the picture that is drawn stays, and can be selected in.
function recordStore(traits, sides, elsewhere) {
  const watchers = new Map(), listeners = new Set();
  let index = null, listed = PAGE, hits = [];
  const side = () => [sides[traits.head.shown], ...Object.values(sides)].find((s) => s?.index); // the one that is asked
  const closed = () => side()?.scene ?? traits.scene;

  // The lines of the outline from the program to a card.
  const way = (id, line = traits.outline.line) => {
    if (!line || line.id === id) return line ? [line] : [];
    for (const inside of line.lines || []) {
      const found = way(id, inside);
      if (found.length) return [line, ...found];
    }
    return [];
  };
  const trail = (id) => (way(id).length ? way(id) : [traits.outline.line].filter(Boolean)).map(({ id: own, name, prefix = "", count }) => ({ id: own, name, prefix, ...(count && { at: 1, of: count }) }));

  const set = (changes) => {
    Object.assign(traits, changes);
    for (const name of Object.keys(changes)) for (const f of watchers.get(name) || []) f();
  };
  const say = (sentence) => set({ problem: sentence ? { code: "", sentence } : null });
  const loaded = async () => { // every node by number and by name; each card with the one around it
    if (!side()) return (index = { cards: [], rows: [], byName: new Map(), number: new Map() });
    if (side().read) return (index = side().read);
    const { cards, strings, nodes } = await unpack(side().index);
    const rows = nodes.map(([id, card, op, value, type, scope, where, twin]) => ({
      id: `n${id}`, card, op: strings[op], value: strings[value], type: strings[type], scope: strings[scope], where: strings[where], twin }));
    index = side().read = { cards, rows, byName: new Map(), number: new Map(cards.map(([name], k) => [`fl-${name}`, k])) };
    for (const r of rows) {
      index.byName.set(r.id, r);
      if (r.value) index.byName.set(r.value, r);
    }
    return index;
  };
  const told = async () => (side() ? (side().told ??= await unpack(side().inspector)) : {}); // what the inspector says, by SVG id and by name
  const scene = async (key) => {
    const made = await unpack(side().scenes[key]);
    Object.assign(await told(), made.inspector);
    return { svg: made.svg, items: made.items };
  };

  const select = async (id, more = {}, name = id) => {
    const scene = more.scene || traits.scene, known = await told(), beside = `${id}`.replace(/^fl-after--/, "fl-");
    const { title = "", html = "", near = [] } = own(known, name) || own(known, beside) || { title: scene.items[id]?.label || name, html: `<p class="quiet">This record holds no more about it. ${elsewhere}</p>` };
    const boxes = near.length ? (await loaded()) && near.map((n) => index.byName.get(`n${n}`)).map((r) => r && visible(scene, r.card)) : [];
    set({ inspector: { name, title, html }, problem: null, trail: trail(id), ...more, marks: { selected: [id], near: boxes.filter((b) => b && b !== id), found: lit(scene), ...more.marks } });
  };

  // The scene that shows a card best: this one if it holds it, else the one of the innermost card around it that was baked.
  const reach = async (card) => {
    const { cards } = await loaded();
    if (`fl-${cards[card][0]}` in traits.scene.items) return traits.scene;
    for (let k = cards[card][1]; k >= 0; k = cards[k][1]) if (side().scenes[cards[k][0]]) return scene(cards[k][0]);
    return closed();
  };
  const visible = (shown, card) => { // the card itself, or the closed one it lies in
    for (let k = card; k >= 0; k = index.cards[k][1]) if (`fl-${index.cards[k][0]}` in shown.items) return `fl-${index.cards[k][0]}`;
    return undefined;
  };

  const pick = async (name) => {
    if (!name) return visit("");
    const home = Object.keys(sides).find((other) => own(sides[other].sites || {}, name) !== undefined);
    if (home && side() !== sides[home]) shown(home); // a site of the program as written
    const { byName, rows, number } = await loaded();
    if (Object.hasOwn(traits.scene.items, name)) return select(name); // a card by its id, as going back to it names it
    if (number.has(`fl-${name}`) || number.has(name)) return choose(number.get(`fl-${name}`) ?? number.get(name), name);
    const card = names().find(name);
    if (card && !byName.has(name)) return choose(card.card, name, card.twin ? { twin: 1 } : undefined);
    const row = byName.get(name) || byName.get(`n${side()?.sites[name]}`), line = row ? [] : rows.filter((r) => r.where === name);
    if (!row && !line.length) return set({ problem: { code: "", sentence: `${name} is not in this record${names().near(name).length ? "; nearest:" : ": the program has no part, value, site or source line of this name."}`, near: names().near(name) } });
    return choose((row || line[0]).card, name, row, line);
  };
  const choose = async (card, name, row, line = []) => {
    const shown = await reach(card), id = visible(shown, card);
    if (!id) return say(`${name} is not in this picture. ${elsewhere}`);
    const linked = line.map((r) => visible(shown, r.card)).filter((x) => x && x !== id);
    const known = await told(), own = [name, `fl-${index.cards[card][0]}`].find((key) => key in known && (key === name || !row || single(row)));
    const brief = own || !row ? {} : { inspector: { name, ...hidden(row, id) } };
    await select(id, { scene: shown, head: { ...traits.head, shown: shown === traits.scene ? traits.head.shown : asked() }, marks: { linked, found: lit(shown) }, ...brief }, own || id);
    if ((row || line[0])?.twin) say(`${name} is in one of several equal parts, of which this page shows only the first; that one is marked. ${elsewhere}`);
  };
  const names = () => (index.naming ??= naming(index, traits.outline, side()?.sites || {}));
  // Selects by a name, and opens the card that it names.
  const open = async (name) => {
    await pick(name);
    const id = traits.marks.selected?.[0], key = id?.replace(/^fl-/, "");
    if (name && !traits.problem?.near && traits.scene.items[id]?.closed && side()?.scenes[key] && names().find(name)) await select(id, { scene: await scene(key), problem: traits.problem });
  };
  // The name that opens the page where it is now; "" while nothing is selected.
  const address = async () => {
    const { name } = traits.inspector, { number } = await loaded(), k = number.get(name) ?? number.get(`fl-${name}`);
    return k === undefined ? (name.startsWith("fl-") ? "" : name) : names().address(k);
  };
  const asked = () => Object.keys(sides).find((name) => sides[name] === side()) ?? traits.head.shown;
  const single = (row) => row.op && index.rows.filter((r) => r.card === row.card).length === 1;
  // A node that no card of the page shows by itself.
  const hidden = (row, id) => ({ title: `${row.op} ${row.value}`, html: rowsHtml([["result", `${row.value} ${row.type}`, true], ["scope", row.scope, true], ["source", row.where, true],
    ["inside", traits.scene.items[id]?.label || "", false]].filter((r) => r[1])) });

  const lit = (scene) => (index ? [...new Set(hits.map((r) => visible(scene, (r.op ? r : index.byName.get(`n${side()?.sites[r.id]}`))?.card ?? -1)).filter(Boolean))] : []); // where hits are seen

  // A line of the outline, or a step of the path.
  const visit = async (id) => {
    const { number } = await loaded();
    if (number.has(id)) return choose(number.get(id), id);
    const { title = "", html = "" } = (await told())[id] || {};
    set({ inspector: title ? { name: id, title, html } : idle(side()), trail: trail(id), marks: { found: lit(traits.scene) }, problem: null });
  };

  const search = async (text) => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return set({ hits: { query: "", total: 0, rows: [] }, marks: { ...traits.marks, found: [] } });
    const { rows } = await loaded();
    const holds = (hay) => words.every((w) => hay.includes(w));
    const sites = traits.panel.passes.flatMap((p) => p.groups.flatMap((g) => g.sites.map((s) => ({ id: s.id, label: s.id, where: g.where, hay: `${s.id} ${p.formula}` }))))
      .concat(traits.panel.declined.flatMap((k) => k.rows.map((r) => ({ id: r.id, label: r.id, where: r.where, hay: `${r.id} ${k.code} ${r.text}` }))));
    for (const r of rows) r.hay ??= `${r.op} ${r.value} ${r.type} ${r.scope} ${r.where}`.toLowerCase();
    const all = [...sites.filter((s) => holds(s.hay.toLowerCase())), ...rows.filter((r) => holds(r.hay))];
    if (text !== traits.hits.query) listed = PAGE;
    hits = all;
    const shown = all.slice(0, listed).map((r) => (r.op ? { id: r.id, label: `${r.op} ${r.value} ${r.type}`, where: [r.scope, r.where].filter(Boolean).join(" · ") } : r));
    set({ hits: { query: text, total: all.length, reach: all.length, rows: shown }, marks: { ...traits.marks, found: lit(traits.scene) } });
  };

  const fold = async (id) => {
    const name = id.replace(/^fl-(after-)?/, ""), item = traits.scene.items[id];
    if (!Object.keys(side()?.scenes || {}).length || sides[traits.head.shown] !== side()) return say(`Cards of this picture do not open here. ${elsewhere}`);
    if (item.closed) {
      if (!side().scenes[name]) return say(`${item.label}: this card stays closed in this record. ${elsewhere}`);
      return select(id, { scene: await scene(name) });
    }
    const { cards, number } = await loaded(), around = cards[cards[number.get(id)]?.[1]]?.[0];
    return select(id, { scene: around && side().scenes[around] ? await scene(around) : closed() });
  };

  const shown = (value) => {
    if (!sides[value]) return say(`That program is not in this record. ${elsewhere}`);
    traits.head = { ...traits.head, shown: value };
    set({ head: traits.head, scene: sides[value].scene, outline: side()?.outline ?? traits.outline, marks: {}, inspector: idle(side()), trail: trail(""), problem: null });
  };

  const exporting = async (suffix) => {
    const svg = new DOMParser().parseFromString(traits.scene.svg, "text/html").querySelector("svg");
    const text = new XMLSerializer().serializeToString(svg), name = `${traits.head.title.replace(/[^\w.-]+/g, "_") || "graph"}${suffix}`;
    const send = (message) => listeners.forEach((f) => f({ type: "download", name, ...message }));
    if (suffix === ".svg") return send({ mime: "image/svg+xml", text });
    const image = new Image(), { width, height } = svg.viewBox.baseVal, canvas = document.createElement("canvas");
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await image.decode();
    const scale = Math.min(2, 8000 / width, 8000 / height);
    [canvas.width, canvas.height] = [width * scale, height * scale];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    send({ mime: "image/png", base64: canvas.toDataURL("image/png").split(",")[1] });
  };

  const answers = { select: (m) => (m.reveal ? visit(m.id) : select(m.id)), pick: (m) => pick(m.name), fold: (m) => fold(m.id), search: (m) => search(m.text), hit: (m) => hits[m.index] && pick(hits[m.index].id),
    more: () => { listed += PAGE; return search(traits.hits.query); },
    shown: (m) => shown(m.value), step: () => say(`Only one of the equal parts is shown here. ${elsewhere}`), export: (m) => exporting(m.suffix), dismiss: () => say("") };
  return {
    get: (name) => traits[name],
    set: (name, value) => set({ [name]: value }),
    on: (name, f) => watchers.set(name, (watchers.get(name) || new Set()).add(f)),
    off: (name, f) => watchers.get(name)?.delete(f),
    send: (message) => Promise.resolve(answers[message.type]?.(message)).catch((error) => say(String(error))), // what only Python can do is switched off
    on_custom: (f) => { listeners.add(f); return () => listeners.delete(f); },
    answers: (type) => type in answers,
    open: (name) => open(name).catch((error) => say(String(error))),
    address,
  };
}
