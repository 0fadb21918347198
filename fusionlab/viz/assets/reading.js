// What can be read of a picture of cards at the scale it is shown in: no text is drawn below LEAST pixels on screen. A card drops lines
// from the bottom, the highest `data-line` first; what stays is drawn at LEAST pixels and cut to the card's width. It works on any
// `g.card` with `.card-body` and `text[data-line]`, and leaves a picture without them as it is.

const LEAST = 9; // px on screen
const TIGHT = 1.15; // from line to line, in sizes of the text
const INSET = 6; // px on screen between a card's side and its text
const DOTS = 1; // length of "…", in sizes of the text

const sizeOf = (text) => parseFloat(getComputedStyle(text).fontSize) || 10;
const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

// Where everything is in the picture, in its own units; read once, at full size, and never again for this drawing.
function readPicture(svg, width) {
  const cards = [...svg.querySelectorAll("g.card")].filter((card) => card.querySelector(".card-body"));
  if (!cards.length) return null;
  const whole = svg.getBoundingClientRect(), unit = width / whole.width;
  const place = (element) => {
    const r = element.getBoundingClientRect();
    return { left: (r.left - whole.left) * unit, right: (r.right - whole.left) * unit, top: (r.top - whole.top) * unit, bottom: (r.bottom - whole.top) * unit };
  };
  // A chip's ground goes where its text goes.
  const read = (element) => ({ element, whole: element.closest(".chip") || element, box: place(element), size: sizeOf(element), anchor: getComputedStyle(element).textAnchor,
    base: element.getNumberOfChars() ? element.getStartPositionOfChar(0).y : place(element).bottom, length: Number(element.getAttribute("textLength")), line: Number(element.dataset.line), own: [...element.childNodes].map((child) => child.cloneNode(true)), said: element.textContent, cut: false, steps: null, pill: element.closest(".pill")?.querySelector(".pill-body") });
  const inside = (card, css) => [...card.querySelectorAll(css)].filter((element) => element.closest("g.card") === card);
  const told = cards.map((card) => {
    const body = place(inside(card, ".card-body")[0] || card.querySelector(".card-body"));
    const tops = [...card.querySelectorAll(":scope g.card .card-body")].map((inner) => place(inner).top);
    return { body, room: Math.min(body.bottom, ...tops), texts: inside(card, "text[data-line]").filter((text) => !text.closest("g[data-line]")).map(read),
      groups: inside(card, "g[data-line]").map((element) => ({ whole: element, sizes: [...element.querySelectorAll("text")].map(sizeOf) })),
      marks: inside(card, "[data-line]:not(text, g)").filter((mark) => !mark.closest("g[data-line]")).map((element) => ({ whole: element, box: place(element), line: Number(element.dataset.line) })) };
  });
  const ours = new Set(told.flatMap((card) => card.texts.map((text) => text.element)));
  const loose = [...svg.querySelectorAll("text")].filter((text) => !ours.has(text) && !text.closest("g.card g[data-line], g.legend")).map(read);
  return { cards: told, loose, legend: svg.querySelector("g.legend"), plain: true, sizes: new Map([...told.flatMap((card) => card.texts), ...loose].map((text) => [text.element, text.size])) };
}

// Draws what can be read at this scale. `read` is what readPicture gave.
function drawReadable(read, scale) {
  if (!read) return;
  const small = (text) => text.size * scale < LEAST - 1e-6;
  const shrunk = (card) => card.texts.some(small) || card.groups.some((group) => group.sizes.some((size) => small({ size })));
  const plain = !read.cards.some(shrunk) && !read.loose.some(small);
  if (read.plain && plain) return;
  read.plain = plain;
  for (const card of read.cards) {
    whole(card);
    if (shrunk(card)) shrink(card, scale);
  }
  if (read.legend) grow(read.legend, scale);
  const bodies = read.cards.map((card) => card.body), placed = [];
  for (const text of read.loose) {
    natural(text);
    if (!small(text)) continue;
    const box = grown(text, scale);
    if ([...placed, ...bodies.filter((body) => !meet(body, text.box))].some((other) => meet(other, box))) hide(text);
    else {
      sized(text, scale);
      text.whole.style.translate = `0 ${box.by}px`;
      if (text.pill) text.pill.style.transform = `scaleX(${(box.right - box.left) / (text.box.right - text.box.left)})`;
      placed.push(box);
    }
  }
}

// The legend grows as a whole, from its lower left corner: its words stay beside their swatches. The note at its right end makes room.
function grow(legend, scale) {
  const by = LEAST / (sizeOf(legend.querySelector("text")) * scale);
  legend.style.transform = by > 1 ? `scale(${by})` : "";
  for (const note of legend.querySelectorAll('[text-anchor="end"]')) note.style.display = by > 1 ? "none" : "";
}

const hide = (item) => { item.whole.style.display = "none"; };
const sizeAt = (text, scale) => Math.max(LEAST, text.size * scale); // on screen
const sized = (text, scale) => {
  const size = sizeAt(text, scale) / scale;
  text.element.style.fontSize = `${size}px`;
  if (text.length) text.element.setAttribute("textLength", (text.length * size) / text.size);
};
const back = (item) => { for (const name of ["display", "translate"]) item.whole.style.removeProperty(name); };
const natural = (text) => {
  if (text.length) text.element.setAttribute("textLength", text.length);
  text.element.style.removeProperty("font-size");
  back(text);
  text.pill?.style.removeProperty("transform");
  if (text.cut) text.element.replaceChildren(...text.own.map((child) => child.cloneNode(true)));
  text.cut = false;
};
const whole = (card) => {
  card.texts.forEach(natural);
  [...card.marks, ...card.groups].forEach(back);
};

// Where a text is once it has its least size: it grows away from where it is anchored, and stays in the middle of its line if moved `by`.
function grown({ box, size, anchor, base }, scale) {
  const by = Math.max(1, LEAST / (size * scale)), wide = (box.right - box.left) * by, high = (box.bottom - box.top) * by;
  const left = anchor === "end" ? box.right - wide : anchor === "middle" ? (box.left + box.right - wide) / 2 : box.left;
  const middle = (box.top + box.bottom) / 2;
  return { left, right: left + wide, top: middle - high / 2, bottom: middle + high / 2, by: middle - base - (middle - base) * by };
}

// The rows of text that stand apart in their own places: in order of their numbers, of equal ones from the top, each stays if it has room
// between those that stay. What is a picture of its own in the card, a group with a line, goes first.
function shrink(card, scale) {
  const rows = [];
  for (const text of [...card.texts].sort((a, b) => a.line - b.line || a.box.left - b.box.left)) {
    let row = rows.find((r) => Math.abs(r.base - text.base) < 4);
    if (!row) rows.push((row = { line: text.line, base: text.base, size: 0, texts: [] }));
    row.texts.push(text);
    row.size = Math.max(row.size, sizeAt(text, scale));
  }
  card.groups.forEach(hide);
  const all = rows.sort((a, b) => a.line - b.line || a.base - b.base);
  const apart = (some) => [...some].sort((a, b) => a.base - b.base).every((row, k, sorted) => !k || (row.base - sorted[k - 1].base) * scale >= Math.max(row.size, sorted[k - 1].size) * TIGHT);
  const fits = (row) => (row.base - card.body.top) * scale >= row.size && (row.base - card.room) * scale <= 1;
  const kept = all.slice(0, 1);
  for (const row of fits(all[0]) ? all.slice(1) : []) if (fits(row) && apart([...kept, row])) kept.push(row);
  const gone = all.filter((row) => !kept.includes(row));
  for (const row of kept) layLine(card, row, scale);
  if (kept.length === 1) centre(card, kept[0], scale);
  for (const row of gone) row.texts.forEach(hide);
  for (const mark of card.marks) if (gone.some((row) => row.line <= mark.line && !kept.some((k) => beside(k, mark)))) hide(mark);
}

const beside = (row, mark) => mark.box.top < row.base + 2 && mark.box.bottom > row.base - row.texts[0].size;

// A title that is left alone stands in the middle of a low card, with what is beside it, and inside of any.
function centre(card, row, scale) {
  const high = (card.room - card.body.top) * scale;
  if (high < row.size) return row.texts.forEach(hide);
  const middle = (card.body.top + card.room) / 2 + (0.35 * row.size) / scale - row.base;
  const by = high <= 2.4 * row.size ? middle : Math.max(0, (row.size + 2) / scale - (row.base - card.body.top));
  if (by) for (const item of [...row.texts, ...card.marks.filter((m) => m.line === row.line)]) item.whole.style.translate = `0 ${by}px`;
}

// The texts of a line: the first one has the card's width and is cut where it is longer; others stay where they still have their room.
function layLine(card, { texts }, scale) {
  const gap = INSET / scale, edge = card.body.right - gap, taken = [];
  for (const text of texts) {
    const box = grown(text, scale);
    const free = box.left >= card.body.left && box.right <= edge + gap && taken.every((other) => box.right + gap / 2 < other.left || other.right + gap / 2 < box.left);
    if (taken.length && !free) {
      hide(text);
      ownMarks(card, texts, text).forEach(hide);
      continue;
    }
    sized(text, scale);
    if (box.right > edge && !taken.length) cut(text, (edge - box.left) / (sizeAt(text, scale) / scale));
    taken.push({ ...box, right: Math.min(box.right, edge) });
  }
  const covered = card.marks.filter(({ box }) => taken.some((other) => meet(other, box)));
  for (const mark of card.marks) if (covered.some(({ box }) => Math.hypot(box.left - mark.box.left, box.top - mark.box.top) < 1)) hide(mark); // a bar with its ground
}

// The swatch or bar in front of a text, behind the text before it.
function ownMarks(card, texts, text) {
  const after = Math.max(...texts.filter((other) => other.box.right <= text.box.left).map((other) => other.box.right), card.body.left);
  return card.marks.filter(({ box }) => box.left >= after && box.right <= text.box.left && meet(box, { ...text.box, left: after }));
}

// Cuts a text with "…" to a length in sizes of the text; what stays keeps its weight.
function cut(text, length) {
  text.element.removeAttribute("textLength");
  text.steps ??= steps(text);
  let keep = text.steps.findLastIndex((reached) => reached <= length - DOTS) + 1, ended = false;
  text.cut = true;
  const walk = (parent) => {
    for (const child of [...parent.childNodes]) {
      if (child.nodeType !== 3) walk(child);
      else if (ended) child.data = "";
      else if (child.data.length <= keep) keep -= child.data.length;
      else {
        child.data = `${child.data.slice(0, keep).trimEnd()}…`;
        ended = true;
      }
    }
  };
  walk(text.element);
}

// How long the first 1, 2, 3 ... characters are, in sizes of the text.
function steps({ element, said, size }) {
  const now = parseFloat(getComputedStyle(element).fontSize) || size;
  return Array.from({ length: Math.min(said.length, element.getNumberOfChars()) }, (_, k) => element.getSubStringLength(0, k + 1) / now);
}
