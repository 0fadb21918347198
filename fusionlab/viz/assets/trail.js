// The path above the graph: the program, the lane and the cards around what is selected, each to be chosen; of equal parts, which one
// is shown, and the way to the next.

function trail(ui) {
  const el = h("nav", { class: "fl-trail", "data-fl": "trail", "aria-label": "path to the selection" });
  const steps = () => ui.store.get("trail") || [];
  const stepper = ({ id, name, of }) => {
    const stays = ui.fixed() && !ui.can("step");
    const one = (by, text, key) => h("button", { type: "button", class: "fl-crumb fl-step", "data-fl": by < 0 ? "copy-back" : "copy-on", "data-by": by, "data-of": id, "aria-keyshortcuts": key, disabled: stays,
      "aria-label": `the ${by < 0 ? "previous one" : "next one"} of ${of}`, title: stays ? ui.why() : `${by < 0 ? "the previous one" : "the next one"} of ${of}: now ${name} (${key})` }, text);
    return h("span", { class: "fl-stepper", "data-key": `${id} steps` }, one(-1, "‹", ","), one(1, "›", "."));
  };
  const crumb = (step, k, all) => {
    const last = k === all.length - 1, whole = [step.prefix, step.name].filter(Boolean).join(" ");
    return [k > 0 && h("span", { class: `fl-quiet${last || step.of > 1 ? "" : " fl-between"}`, "aria-hidden": "true", "data-key": `${step.id} after` }, "›"),
      h("button", { type: "button", class: `fl-crumb${k ? "" : " fl-first"}${last || step.of > 1 ? "" : " fl-between"}`, style: `min-width: calc(${Math.min(step.name.length, last ? 8 : 5)}ch + 6px)`, "data-crumb": step.id, "data-key": step.id || "-", "aria-current": last ? "location" : null, title: whole,
        "aria-label": whole }, step.name), step.of > 1 && stepper(step)];
  };
  const draw = () => fill(el, steps().flatMap(crumb));
  ui.on(el, "click", (e) => {
    const { crumb: id, by, of } = e.target.dataset;
    if (by !== undefined) ui.store.send({ type: "step", id: of, by: Number(by) });
    else if (id !== undefined) ui.visit(id);
  });
  return { el, draw };
}
