// A picture of the picture in a corner of the pane: rectangles only, and the part in sight. It is there only while not all is in sight,
// and lies over no box.

// `view` has pane, place, shape(id), items(), boxes(), size(), on(id), move().
function minimap(view) {
  const { pane, place } = view;
  const el = h("div", { class: "fl-minimap", "aria-hidden": "true", hidden: true });
  let scale = 1, held = false;
  const frame = (id) => view.items()[id]?.group && !view.items()[id].closed;

  const build = () => {
    const { width, height } = view.size();
    scale = Math.min(150 / width, Math.max(110, pane.clientHeight * 0.45) / height);
    el.style.width = `${Math.max(10, width * scale)}px`;
    el.style.height = `${Math.max(10, height * scale)}px`;
    const dots = [...view.boxes()].map(([id, b]) => {
      const at = `left:${b.x * scale}px;top:${b.y * scale}px;width:${Math.max(1, b.w * scale)}px;height:${Math.max(1, b.h * scale)}px`;
      const pass = view.shape(id).matches(".candidate, .applied, .declined, .fused") ? " fl-hot" : "";
      return h("i", { class: frame(id) ? "fl-frame" : `fl-dot${pass}`, style: at });
    });
    el.replaceChildren(...dots, h("b"));
    draw();
  };
  const draw = () => {
    const { width, height } = view.size(), [wide, high] = [pane.clientWidth / place.scale, pane.clientHeight / place.scale];
    const all = [...view.boxes().keys()].map(view.on).every((b) => b.x >= -1 && b.y >= -1 && b.x + b.w <= pane.clientWidth + 1 && b.y + b.h <= pane.clientHeight + 1);
    el.hidden = !view.boxes().size || all || pane.clientWidth < 340 || (!held && !corner());
    const sight = el.lastChild;
    if (el.hidden || !sight) return;
    const clip = (v, most) => Math.min(most, Math.max(0, v)), [x, y] = [-place.x / place.scale, -place.y / place.scale];
    const [left, top, right, bottom] = [clip(x, width), clip(y, height), clip(x + wide, width), clip(y + high, height)];
    Object.assign(sight.style, { left: `${left * scale}px`, top: `${top * scale}px`, width: `${(right - left) * scale}px`, height: `${(bottom - top) * scale}px` });
  };
  // Puts the map into a corner where it lies over no box, the lower ones first; false where there is none.
  const corner = () => {
    const [w, t] = [parseFloat(el.style.width), parseFloat(el.style.height)], far = [pane.clientWidth - w - 10, pane.clientHeight - t - 10];
    const free = ([x, y]) => [...view.boxes().keys()].every((id) => {
      const b = view.on(id), high = frame(id) ? Math.min(b.h, 24 * place.scale) : b.h; // of a frame its title
      return b.x > x + w + 4 || b.x + b.w < x - 4 || b.y > y + t + 4 || b.y + high < y - 4;
    });
    const spot = [[far[0], far[1]], [10, far[1]], [far[0], 10], [10, 10]].find(free);
    if (spot) Object.assign(el.style, { left: `${spot[0]}px`, top: `${spot[1]}px` });
    return !!spot;
  };
  const hold = (event) => { // while the pointer is down on it, it stays where it is
    held = true;
    const r = el.getBoundingClientRect();
    place.x = pane.clientWidth / 2 - ((event.clientX - r.left) / scale) * place.scale;
    place.y = pane.clientHeight / 2 - ((event.clientY - r.top) / scale) * place.scale;
    view.move();
  };
  return { el, build, draw, hold, release: () => { held = false; } };
}
