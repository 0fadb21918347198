// Stands in for the kernel in the standalone page: answers the explorer's messages from what Python baked into the page.
// Follows explorer.js in one module, and calls its `mount`.
const ELSEWHERE = "It opens in a live kernel: fusionlab.explore(fn, *args).";
const MOST_HITS = 50;

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Rows of (name, text, monospaced) as HTML; texts enter as text.
function rowsHtml(rows) {
  const list = document.createElement("dl");
  for (const [key, text, mono] of rows) {
    list.append(Object.assign(document.createElement("dt"), { textContent: key }));
    list.append(Object.assign(document.createElement("dd"), { textContent: text, className: mono ? "mono" : "" }));
  }
  return list.outerHTML;
}

function bakedStore(data, pictures, tabs) {
  const traits = { head: data.head, panel: data.panel, tabs, theme: "auto", busy: { running: false }, problem: null,
    inspector: { title: "", html: "" }, hits: {}, marks: {}, scene: { svg: pictures.before, items: data.items } };
  const watchers = new Map(), listeners = new Set();
  const before = traits.scene;
  let index = null, known = null;

  const set = (changes) => {
    Object.assign(traits, changes);
    for (const name of Object.keys(changes)) for (const f of watchers.get(name) || []) f();
  };
  const say = (sentence) => set({ problem: sentence ? { code: "", sentence } : null });
  const loaded = async () => { // every node by number and by name; each group with the one around it
    if (index) return index;
    const { groups, strings, nodes } = await unpack(data.index);
    const rows = nodes.map(([id, box, group, op, value, type, scope, where]) => ({
      id: `n${id}`, box: `fl-${strings[box]}`, group, op: strings[op], value: strings[value], type: strings[type], scope: strings[scope], where: strings[where] }));
    index = { groups, rows, byName: new Map(), number: new Map(groups.map(([name], k) => [name, k])) };
    for (const r of rows) {
      index.byName.set(r.id, r);
      if (r.value) index.byName.set(r.value, r);
    }
    return index;
  };
  const told = async () => (known ??= await unpack(data.inspector)); // what the inspector says, by SVG id and by name
  const scene = async (key) => {
    const made = await unpack(data.scenes[key]);
    Object.assign(await told(), made.inspector);
    return { svg: made.svg, items: made.items };
  };

  const select = async (id, more = {}, name = id) => {
    const { title = "", html = "", near = [] } = (await told())[name] || {};
    const scene = more.scene || traits.scene;
    const boxes = near.length ? (await loaded()) && near.map((n) => index.byName.get(`n${n}`)).map((r) => r && visible(scene, r.box, r.group)) : [];
    set({ inspector: { name, title, html }, problem: null, ...more, marks: { selected: [id], near: boxes.filter((b) => b && b !== id), ...more.marks } });
  };

  // The scene that shows a box best: this one if it holds it, else the one of the innermost group that was baked.
  const reach = async (box, group) => {
    if (box in traits.scene.items) return traits.scene;
    const { groups } = await loaded();
    for (let g = group; g >= 0; g = groups[g][1]) {
      const [name, , open] = groups[g];
      if (data.scenes[name]) return scene(name);
      if (open) break;
    }
    return before;
  };
  const visible = (shown, box, group) => { // the box itself, or the closed group it lies in
    const chain = [box];
    for (let g = group; g >= 0; g = index.groups[g][1]) chain.push(`fl-${index.groups[g][0]}`);
    return chain.find((id) => id in shown.items);
  };

  const pick = async (name) => {
    const { byName, rows, number, groups } = await loaded();
    if (name in traits.scene.items) return select(name); // a box by its id, as going back to it names it
    const [box = number.has(name.slice(3)) && name.startsWith("fl-") ? name.slice(3) : undefined, node] = data.sites[name] || [];
    const row = byName.get(name) || byName.get(`n${node}`) || rows.find((r) => r.box === name);
    const line = row ? [] : rows.filter((r) => r.where === name);
    const target = number.has(box) ? { box: `fl-${box}`, group: groups[number.get(box)][1] } : row || line[0];
    if (!target) return say(`${name} is not in this page. ${ELSEWHERE}`);
    const shown = await reach(target.box, target.group);
    const id = visible(shown, target.box, target.group);
    if (!id) return say(`${name} is not in this picture. ${ELSEWHERE}`);
    const linked = line.map((r) => visible(shown, r.box, r.group)).filter((x) => x && x !== id);
    const own = box ? `fl-${box}` : row ? row.box : name;
    const brief = own in (await told()) || id === own ? {} : { inspector: { name, ...hidden(row, id) } };
    await select(id, { scene: shown, head: { ...traits.head, shown: "before" }, marks: { linked }, ...brief }, own);
  };
  // A node that no picture of the page shows by itself.
  const hidden = (row, id) => ({ title: `${row.op} ${row.value}`, html: rowsHtml([["result", `${row.value} ${row.type}`, true], ["scope", row.scope, true], ["source", row.where, true],
    ["inside", `a closed group. ${data.scenes[id.slice(3)] ? "Press Space on it to open it." : ELSEWHERE}`, false]].filter((r) => r[1])) });

  const search = async (text) => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return set({ hits: { query: "", total: 0, rows: [] }, marks: { ...traits.marks, found: [] } });
    const { rows } = await loaded();
    const holds = (hay) => words.every((w) => hay.includes(w));
    const sites = traits.panel.passes.flatMap((p) => p.groups.flatMap((g) => g.sites.map((s) => ({ id: s.id, label: s.id, where: g.where, hay: `${s.id} ${p.formula}` }))))
      .concat(traits.panel.declined.flatMap((k) => k.rows.map((r) => ({ id: r.id, label: r.id, where: r.where, hay: `${r.id} ${k.code} ${r.text}` }))));
    for (const r of rows) r.hay ??= `${r.op} ${r.value} ${r.type} ${r.scope} ${r.where}`.toLowerCase();
    const all = [...sites.filter((s) => holds(s.hay.toLowerCase())), ...rows.filter((r) => holds(r.hay))];
    const found = all.map((r) => (r.box ? visible(traits.scene, r.box, r.group) : `fl-${(data.sites[r.id] || [])[0]}`)).filter((id) => id in traits.scene.items);
    const shown = all.slice(0, MOST_HITS).map((r) => (r.box ? { id: r.id, label: `${r.op} ${r.value} ${r.type}`, where: [r.scope, r.where].filter(Boolean).join(" · ") } : r));
    set({ hits: { query: text, total: all.length, rows: shown }, marks: { ...traits.marks, found: [...new Set(found)] } });
  };

  const fold = async (id) => {
    const name = id.replace(/^fl-(after-)?/, ""), item = traits.scene.items[id];
    if (traits.head.shown === "after") return say(`The fused program is one picture here. ${ELSEWHERE}`);
    const { groups, number } = await loaded();
    if (item.closed) {
      if (!data.scenes[name]) return say(`${item.label}: this group is closed in the page. ${ELSEWHERE}`);
      return select(id, { scene: await scene(name) });
    }
    if (data.scenes[`-${name}`] && !(id in before.items && before.items[id].closed)) return select(id, { scene: await scene(`-${name}`) });
    for (let g = groups[number.get(name)]?.[1] ?? -1; ; g = groups[g][1]) { // back to the picture before it was opened
      const back = g < 0 || groups[g][2] ? before : data.scenes[groups[g][0]] ? await scene(groups[g][0]) : null;
      if (back && back.items[id]?.closed) return select(id, { scene: back });
      if (g < 0) return say(`${item.label}: this group stays open in the page. ${ELSEWHERE}`);
    }
  };

  const shown = (value) => {
    const after = value === "after";
    const now = after ? { svg: pictures.after, items: data.after } : before;
    set({ head: { ...traits.head, shown: value }, scene: now, marks: {}, inspector: { title: "", html: "" }, problem: null });
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

  const answers = { select: (m) => select(m.id), pick: (m) => pick(m.name), fold: (m) => fold(m.id), search: (m) => search(m.text),
    shown: (m) => shown(m.value), export: (m) => exporting(m.suffix), dismiss: () => say("") };
  return {
    get: (name) => traits[name],
    set: (name, value) => set({ [name]: value }),
    on: (name, f) => watchers.set(name, (watchers.get(name) || new Set()).add(f)),
    off: (name, f) => watchers.get(name)?.delete(f),
    send: (message) => Promise.resolve(answers[message.type]?.(message)).catch((error) => say(String(error))),
    on_custom: (f) => { listeners.add(f); return () => listeners.delete(f); },
  };
}

// The sections that a reader without scripts sees one below the other become the tabs.
function openPage() {
  const data = JSON.parse(document.getElementById("fl-data").textContent);
  const home = document.getElementById("fl-app");
  if (!home) return;
  const picture = (id) => document.querySelector(`#${id} svg`)?.outerHTML;
  const pictures = { before: picture("fl-before"), after: picture("fl-after") };
  const sections = [...document.querySelectorAll("[data-fl-section]")];
  const tabs = sections.map((s) => ({ name: s.dataset.flSection, html: s.innerHTML }));
  for (const section of [...sections, document.getElementById("fl-after")]) section?.remove();
  home.replaceChildren();
  document.body.classList.add("fl-live");
  const store = bakedStore(data, pictures, tabs);
  mount(home, store);
  // The page around the explorer follows its theme.
  const follow = () => { document.body.dataset.theme = store.get("theme"); };
  store.on("theme", follow);
}

openPage();
