// The standalone page: its sections become the tabs of an explorer over the record that the page holds.
// The sections that a reader without scripts sees one below the other become the tabs.
function openPage() {
  const data = JSON.parse(document.getElementById("fl-data").textContent);
  const home = document.getElementById("fl-app");
  if (!home) return;
  const picture = (id) => document.querySelector(`#${id} svg`)?.outerHTML;
  const pictures = { before: picture("fl-before"), after: picture("fl-after") };
  const sections = [...document.querySelectorAll("[data-fl-section]")];
  const tabs = sections.map((s) => ({ name: s.dataset.flSection, html: s.innerHTML, empty: "flEmpty" in s.dataset }));
  for (const section of [...sections, document.getElementById("fl-after")]) section?.remove();
  home.replaceChildren();
  document.body.classList.add("fl-live");
  const sides = { before: { ...data, scene: { svg: pictures.before, items: data.items } } };
  if (pictures.after) sides.after = { ...data.after, scene: { svg: pictures.after.replaceAll('id="fl-after-', 'id="fl-'), items: data.after.items } };
  const { id, name } = data.outline.line;
  const store = recordStore({ head: data.head, panel: data.panel, tabs, theme: "auto", busy: { running: false }, problem: null, inspector: idle(data),
    outline: data.outline, trail: [{ id, name, prefix: "" }], hits: {}, marks: {}, scene: sides.before.scene }, sides, `It opens in a live kernel: fusionlab.explore(fn, *args).`);
  mount(home, store);
  followAddress(store);
  // The page around the explorer follows its theme.
  const follow = () => { document.body.dataset.theme = store.get("theme"); };
  store.on("theme", follow);
}

openPage();
