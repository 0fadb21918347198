// Clicking (or Enter on) a box of the picture shows what is known about it. Text only ever enters through textContent.
(() => {
  const data = JSON.parse(document.getElementById("fl-data").textContent);
  const pane = document.getElementById("fl-inspector");
  const element = (tag, text, className) => {
    const e = document.createElement(tag);
    if (text !== undefined) e.textContent = text;
    if (className) e.className = className;
    return e;
  };
  const show = (id) => {
    const item = data[id];
    if (!item) return;
    pane.replaceChildren(element("h3", item.title));
    const list = element("dl");
    for (const [key, value, mono] of item.rows) {
      list.append(element("dt", key));
      list.append(element("dd", value, mono ? "mono" : ""));
    }
    pane.append(list);
    document.querySelectorAll(".selected").forEach((e) => e.classList.remove("selected"));
    document.getElementById(id).classList.add("selected");
  };
  for (const id of Object.keys(data)) {
    const shape = document.getElementById(id);
    if (!shape) continue;
    shape.setAttribute("tabindex", "0");
    shape.setAttribute("role", "button");
    shape.setAttribute("aria-label", data[id].title);
    shape.addEventListener("click", (event) => { event.stopPropagation(); show(id); });
    shape.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopPropagation();
      show(id);
    });
  }
})();
