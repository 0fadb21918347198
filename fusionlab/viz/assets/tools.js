// The bar over the graph: back and forward, the path, which program is shown, zoom, and what opens and frames what is selected.

// `view` has items(), boxes(), selected(), fit(), frame(id), fold(id), zoom(by).
function tools(ui, view) {
  const past = h("span", { class: "fl-some" }), rest = h("span", { class: "fl-some" }), path = trail(ui);
  const el = h("div", { class: "fl-tools", role: "toolbar", "aria-label": "graph" }, past, path.el, rest);
  const icon = (hook, text, name, more = {}) => button(hook, text, null, { class: "fl-icon", title: name, "aria-label": name, ...more });
  const draw = () => {
    const { shown = "before", hulls = false } = ui.head(), id = view.selected(), item = view.items()[id], framed = view.boxes().has(id);
    const titles = { before: "the program as written", after: ui.can("after") ? "the program with the sites fused" : ui.head().gone ? ui.why() : ui.fixed() ? "this page has no fused program" : `there are only findings here; fusing them ${LIVE}`,
      both: ui.can("both") ? "before and after side by side: each row shows the same work" : ui.fixed() ? ui.why() : `there are only findings here; fusing them ${LIVE}` };
    const side = (name) => button(name, name, { type: "shown", value: name }, { "aria-pressed": String(shown === name), disabled: name !== "before" && !ui.can(name), title: titles[name] });
    const step = (hook, text, by, name, none) => icon(hook, text, ui.past.can(by) ? name : none, { disabled: !ui.past.can(by) });
    fill(past, step("back", "◂", -1, "previous selection (Alt+←)", "there is no previous selection"), step("forward", "▸", 1, "next selection (Alt+→)", "there is no next selection"));
    fill(rest, h("div", { class: "fl-switch", role: "group", "aria-label": "which program" }, side("before"), side("after"), side("both")),
      button("hulls", ["XLA", h("span", { class: "fl-roomy" }, " kernels")], { type: "hulls", on: !hulls }, { "aria-pressed": String(hulls), disabled: !ui.can("xla"), title: ui.can("xla") ? "show in each box which XLA kernel it runs in" : ui.fixed() ? ui.why() : "only for the program as written: choose before" }),
      button("fold", item?.group && !item.closed ? "Close" : "Open", null, { disabled: !item?.group, title: item?.group ? "open or close the selected group (Space, or a double click)" : id ? "the selection has nothing to open" : "select a group to open it" }),
      icon("zoom-out", "−", "zoom out"), icon("zoom-in", "+", "zoom in"), icon("frame", "⊡", framed ? "frame the selection (f)" : "the selection is not in the picture", { disabled: !framed }),
      icon("fit", "⤢", "fit the whole graph (0)"));
  };
  const acts = { fit: view.fit, frame: () => view.frame(view.selected()), back: () => ui.past.go(-1), forward: () => ui.past.go(1), "zoom-in": () => view.zoom(1.25), "zoom-out": () => view.zoom(0.8), fold: () => view.fold(view.selected()) };
  ui.on(el, "click", (e) => acts[e.target.dataset.fl]?.());
  return { el, draw, path: path.draw };
}
