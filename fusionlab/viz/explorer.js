// The graph pane: draws the SVG that Python computed, pans and zooms it, and reports clicks. Knows nothing about graphs.

const STEP = 60; // pixels an arrow key moves the picture by

function render({ model, el }) {
  const abort = new AbortController();
  const on = (target, type, handler, options = {}) =>
    target.addEventListener(type, handler, { signal: abort.signal, ...options });

  const root = document.createElement("div");
  root.className = "fl";
  const pane = document.createElement("div");
  pane.className = "fl-graph fl-pane";
  pane.tabIndex = 0;
  pane.setAttribute("role", "group");
  pane.setAttribute("aria-label", "graph; arrow keys move it, plus and minus zoom, 0 fits it; Tab walks the boxes");
  const canvas = document.createElement("div");
  const tools = document.createElement("div");
  tools.className = "fl-tools";
  pane.append(canvas, tools);
  root.append(pane);
  el.append(root);

  const place = { x: 0, y: 0, scale: 1 };
  const svg = () => canvas.querySelector("svg");
  const move = () => {
    const picture = svg();
    if (picture) picture.style.transform = `translate(${place.x}px, ${place.y}px) scale(${place.scale})`;
  };
  const zoom = (factor, x = pane.clientWidth / 2, y = pane.clientHeight / 2) => {
    const scale = Math.min(8, Math.max(0.05, place.scale * factor));
    place.x = x - ((x - place.x) * scale) / place.scale;
    place.y = y - ((y - place.y) * scale) / place.scale;
    place.scale = scale;
    move();
  };
  const fit = () => {
    const picture = svg();
    if (!picture) return;
    const box = picture.viewBox.baseVal;
    // A tall graph is read from the top at a legible size rather than shrunk to a ribbon.
    const whole = Math.min(pane.clientWidth / box.width, pane.clientHeight / box.height);
    place.scale = Math.min(1.2, Math.max(whole, Math.min(0.75, pane.clientWidth / box.width)));
    place.x = Math.max(0, (pane.clientWidth - box.width * place.scale) / 2);
    place.y = 0;
    move();
  };

  for (const [label, name, action] of [
    ["+", "zoom in", () => zoom(1.25)],
    ["−", "zoom out", () => zoom(0.8)],
    ["⤢", "fit", fit],
  ]) {
    const button = document.createElement("button");
    button.textContent = label;
    button.title = name;
    button.setAttribute("aria-label", name);
    on(button, "click", action);
    tools.append(button);
  }

  const shape = (id) => {
    const found = id ? canvas.querySelector(`[id="${CSS.escape(id)}"]`) : null;
    return found;
  };
  const mark = () => {
    canvas.querySelectorAll(".selected").forEach((e) => e.classList.remove("selected"));
    shape(model.get("selected_id"))?.classList.add("selected");
  };
  const dim = () => pane.classList.toggle("dimmed", model.get("dimmed"));
  const draw = () => {
    const first = !svg();
    canvas.innerHTML = model.get("svg"); // made and escaped by Python
    const picture = svg();
    if (picture) {
      picture.removeAttribute("width");
      picture.removeAttribute("height");
      picture.style.width = `${picture.viewBox.baseVal.width}px`;
    }
    for (const [id, label] of Object.entries(model.get("labels"))) {
      const box = shape(id);
      if (!box) continue;
      box.setAttribute("tabindex", "0");
      box.setAttribute("role", "button");
      box.setAttribute("aria-label", label);
    }
    if (first) fit();
    else move();
    mark();
  };

  const target = (event) => {
    const box = event.target.closest?.('[role="button"]');
    return box && canvas.contains(box) ? box.id : null;
  };
  let drag = null;
  on(pane, "pointerdown", (event) => {
    if (tools.contains(event.target)) return;
    drag = { x: event.clientX - place.x, y: event.clientY - place.y, moved: false };
  });
  on(pane, "pointermove", (event) => {
    if (!drag) return;
    const [x, y] = [event.clientX - drag.x, event.clientY - drag.y];
    if (!drag.moved && Math.hypot(x - place.x, y - place.y) < 4) return;
    if (!drag.moved) pane.setPointerCapture(event.pointerId);
    drag.moved = true;
    [place.x, place.y] = [x, y];
    move();
  });
  on(pane, "pointerup", (event) => {
    const clicked = drag && !drag.moved ? target(event) : null;
    drag = null;
    if (clicked) model.send({ type: "select", id: clicked });
  });
  on(pane, "pointercancel", () => { drag = null; });
  on(pane, "dblclick", (event) => {
    const id = target(event);
    if (id) model.send({ type: "fold", id });
  });
  on(pane, "wheel", (event) => {
    event.preventDefault();
    const box = pane.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(-event.deltaY / 200), event.clientX - box.left, event.clientY - box.top);
    else { place.x -= event.deltaX; place.y -= event.deltaY; move(); }
  }, { passive: false });
  on(pane, "keydown", (event) => {
    if (event.target.closest("button")) return;
    const id = target(event);
    const actions = {
      ArrowLeft: () => { place.x += STEP; move(); },
      ArrowRight: () => { place.x -= STEP; move(); },
      ArrowUp: () => { place.y += STEP; move(); },
      ArrowDown: () => { place.y -= STEP; move(); },
      "+": () => zoom(1.25),
      "=": () => zoom(1.25),
      "-": () => zoom(0.8),
      0: fit,
    };
    if (id) {
      actions.Enter = () => model.send({ type: event.shiftKey ? "fold" : "select", id });
      actions[" "] = () => model.send({ type: "fold", id });
    }
    if (!actions[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  });

  const watch = { "change:svg": draw, "change:selected_id": mark, "change:dimmed": dim };
  for (const [name, handler] of Object.entries(watch)) model.on(name, handler);
  draw();
  dim();
  requestAnimationFrame(fit);
  return () => {
    abort.abort();
    for (const [name, handler] of Object.entries(watch)) model.off(name, handler);
    root.remove();
  };
}

export default { render };
