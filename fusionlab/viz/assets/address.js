// The page's address names what is selected: `page.html#layer_17/attn` opens there, and what is selected is written into it.

function followAddress(store) {
  const raw = () => location.hash.slice(1);
  const decoded = () => { try { return decodeURIComponent(raw()); } catch { return raw(); } };
  const read = () => (/^%\d+$/.test(raw()) ? raw() : decoded()); // a value's own name is no escape
  const written = (name) => (/^%\d+$/.test(name) ? name : encodeURI(name));
  let going = 0;
  const go = async () => {
    going += 1;
    await store.open(read());
    going -= 1;
  };
  store.on("inspector", async () => {
    if (going) return; // what was asked for stays written as it was
    const name = await store.address();
    if (!going && name !== read()) window.history.replaceState(null, "", name ? `#${written(name)}` : location.pathname + location.search);
  });
  addEventListener("hashchange", go); // back and forward too
  if (raw()) go();
}
