// Copying: one small button, beside whatever the pointer or the focus is on of what can be copied: a name, a value, a source line, a row.

const COPIED = ".fl-say strong, .fl-sentence, [data-fl-pick]:not(svg *), .fl-html :is(code, pre, td, dd), .fl-inspector h3";
const ALONE = ":is(dd, pre, .fl-equation):not(:has(button, a))"; // nothing in these takes the focus: they do themselves
const SAYS = 1200; // ms that it says so

async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // none in a page that is no secure one, or not allowed: the older way
    const box = h("textarea", { class: "fl-sr", "aria-hidden": "true" });
    box.value = text;
    const had = document.activeElement;
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    had?.focus?.({ preventScroll: true });
    if (!done) throw new Error("this browser does not let a page copy");
  }
}

function copying(ui) {
  const el = h("button", { type: "button", class: "fl-copy", "data-fl": "copy", "data-key": "fl-copy", popover: "manual", title: "copy (c)" });
  const said = h("span", { class: "fl-sr", role: "status" });
  ui.root.append(said);
  let at = null, timer = 0, text = "";
  const textOf = (e) => (e.dataset.flPick || [...e.childNodes].filter((c) => c !== el).map((c) => c.innerText ?? c.textContent).join("")).trim();
  const say = (word) => { el.textContent = word; el.classList.toggle("fl-done", word !== "copy"); };
  const open = () => el.matches(":popover-open");
  const hide = () => {
    if (el.isConnected && open()) el.hidePopover?.();
    el.remove();
    at = null;
  };
  const show = (e) => {
    clearTimeout(timer);
    if (e === at && el.isConnected) return;
    hide();
    text = textOf(e);
    if (!text) return;
    at = e;
    say("copy");
    el.setAttribute("aria-label", `copy ${text.slice(0, 80)}`);
    if (e.matches("button, [role=button]")) e.after(el); // the next stop of the Tab key
    else e.append(el);
    el.showPopover?.();
    const r = [...e.getClientRects()].at(-1), wide = el.offsetWidth, pane = ui.root.getBoundingClientRect();
    el.style.left = `${Math.min(r.right - 4, pane.right - wide - 2, innerWidth - wide - 2)}px`;
    el.style.top = `${Math.max(0, r.top - el.offsetHeight + 5)}px`;
  };
  const copy = async (e = at) => {
    show(e);
    const word = await toClipboard(text).then(() => "copied", (error) => error.message);
    say(word);
    said.textContent = `${word} ${text.slice(0, 80)}`;
    timer = setTimeout(() => { say("copy"); said.textContent = ""; }, SAYS);
  };
  const target = (e) => e.closest?.(COPIED);
  const over = (e) => {
    if (el.contains(e.target)) return clearTimeout(timer);
    const to = target(e.target);
    if (to && ui.root.contains(to)) return show(to);
    if (at && !focused(el) && !el.classList.contains("fl-done")) timer ||= setTimeout(() => { timer = 0; if (!el.matches(":hover") && !focused(el)) hide(); }, 250);
  };
  ui.on(ui.root, "pointerover", (e) => { clearTimeout(timer); timer = 0; over(e); });
  ui.on(ui.root, "pointerleave", () => { if (!focused(el)) hide(); });
  ui.on(ui.root, "focusin", (e) => {
    if (el.contains(e.target)) return;
    const to = target(e.target);
    if (to) show(to);
    else if (at && !at.matches(":hover")) hide();
  });
  ui.on(ui.root, "scroll", () => { if (!focused(el)) hide(); }, { capture: true });
  ui.on(el, "click", (e) => { e.stopPropagation(); copy(); });
  // What has the focus; where nothing that can be copied has it, what is selected.
  const key = () => {
    const now = ui.root.getRootNode().activeElement, to = focused(el) ? at : target(now) || ui.root.querySelector(".fl-inspector h3");
    if (to) copy(to);
  };
  return { key };
}
