// What a name names in a record: a card by its scope ("layer_17/attn") or by its place in the outline ("backward/head"); its address
// again; and what comes nearest to a name that names nothing.

const MOSTLY = 0.8; // of a scope's nodes that the card called by it holds
const NEAR = 0.35; // likeness from which a name is proposed
const MOST_NEAR = 3;

// `index` is a record's: { cards: [[id, card around it or -1]], rows, number: svg id -> card }; `outline` its tree; `sites` site -> node.
function naming(index, outline, sites) {
  const paths = new Map(), called = new Map();
  const walk = (line, way) => {
    const k = index.number.get(line.id), short = way.slice(1).join("/");
    if (k !== undefined) {
      called.set(k, [short, way.join("/")]);
      for (const path of called.get(k)) if (!paths.has(path)) paths.set(path, k);
    }
    for (const inside of line.lines || []) walk(inside, [...way, inside.name]);
  };
  if (outline?.line) walk(outline.line, []);
  const chain = (k) => (k < 0 ? [] : [k, ...chain(index.cards[k][1])]);
  const inside = (name) => index.rows.filter((r) => r.scope === name || r.scope.startsWith(`${name}/`));
  const scoped = (name) => {
    const rows = name ? inside(name) : [], tops = new Map();
    for (const r of rows) tops.set(chain(r.card).at(-1), (tops.get(chain(r.card).at(-1)) || 0) + 1);
    const top = [...tops.keys()].sort((a, b) => a - b).find((k) => tops.get(k) >= rows.length / 4), mine = rows.filter((r) => chain(r.card).at(-1) === top);
    return mine.length ? { card: chain(mine[0].card).find((k) => mine.filter((r) => chain(r.card).includes(k)).length >= MOSTLY * mine.length), twin: mine.every((r) => r.twin) } : undefined;
  };
  const find = (name) => (paths.has(name) ? { card: paths.get(name), twin: 0 } : scoped(name));
  // The scope that the nodes of a card share.
  const scope = (k) => {
    const all = index.rows.filter((r) => !r.twin && chain(r.card).includes(k)).map((r) => r.scope.split("/"));
    return (all[0] || []).filter((part, i) => all.every((s) => s.slice(0, i + 1).join("/") === all[0].slice(0, i + 1).join("/"))).join("/");
  };
  const address = (k) => {
    const site = Object.keys(sites).find((id) => index.byName.get(`n${sites[id]}`)?.card === k);
    return site ?? [scope(k), ...called.get(k) || []].find((name) => name && find(name)?.card === k) ?? index.cards[k][0];
  };
  const pairs = (text) => { const t = ` ${text.toLowerCase()} `; return new Set([...t].slice(1).map((c, i) => t[i] + c)); };
  const near = (name) => {
    const mine = pairs(name), all = new Set([...Object.keys(sites), ...paths.keys(), ...index.rows.flatMap((r) => [r.scope, r.where, r.value])].filter(Boolean));
    const like = (other) => { const its = pairs(other); return (2 * [...mine].filter((p) => its.has(p)).length) / (mine.size + its.size); };
    return [...all].map((other) => [like(other), other]).filter(([l]) => l >= NEAR).sort((a, b) => b[0] - a[0] || a[1].length - b[1].length).slice(0, MOST_NEAR).map(([, other]) => other);
  };
  return { find, address, near };
}
