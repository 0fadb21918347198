// What a reader sees of the explorer's picture, in px of the window: texts, cards, pills and edges, as drawn at the scale they are shown in.
() => {
  const pane = document.querySelector("[data-fl=graph]"), svg = pane.querySelector("svg"), scale = svg.getScreenCTM().a;
  const place = (e) => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const seen = (e) => e.checkVisibility() && e.getBoundingClientRect().width > 0;
  // Letters stand in the middle of the line that the browser reserves for them.
  const letters = (e) => { const [left, top, right, bottom] = place(e), by = (bottom - top) * 0.2; return [left, top + by, right, bottom - by]; };
  const body = (group) => group.querySelector(":scope > .card-body, :scope > .pill-body");
  const boxes = [...svg.querySelectorAll("g.card, g.pill")].filter(body).map((g) => ({ id: g.id, name: g.getAttribute("aria-label") || "", pill: g.matches(".pill"),
    title: [...g.querySelectorAll("text.title")].find((t) => t.closest("g.card") === g)?.textContent ?? "", open: g.getAttribute("aria-expanded") === "true", box: place(body(g)) }));
  const texts = [...svg.querySelectorAll("text")].filter(seen).map((t) => ({ text: t.textContent, box: letters(t), px: parseFloat(getComputedStyle(t).fontSize) * scale,
    label: t.matches(".edge-label"), card: t.closest("g.card, g.pill")?.id ?? "" }));
  const edges = [...svg.querySelectorAll("g.edge")].map((g) => {
    const path = g.querySelector(".edge-line"), matrix = path.getScreenCTM(), length = path.getTotalLength();
    const points = Array.from({ length: Math.ceil(length / 4) + 1 }, (_, k) => path.getPointAtLength(Math.min(length, 4 * k)).matrixTransform(matrix)).map((p) => [p.x, p.y]);
    return { start: g.dataset.start, end: g.dataset.end, points };
  });
  const drawn = [...svg.querySelectorAll(".lane-body, .card-body, .pill-body, text")].filter(seen).map(place);
  const passes = [...new Set([...svg.querySelectorAll("[data-pass]")].filter(seen).map((e) => e.dataset.pass))];
  const measure = document.querySelector("[data-fl=measure]"), sentence = document.querySelector("[data-fl=sentence]");
  return { scale, boxes, texts, edges, drawn, passes, pane: place(pane), measure: place(measure), sentence: place(sentence), window: [0, 0, innerWidth, innerHeight] };
}
