/* Jobs: rows change in place; a new job appears on top. Nothing reorders. */
(() => {
  "use strict";
  const { fetched, throttled, localise } = window.mistudio;
  const table = document.querySelector("[data-rows]");
  const rows = document.getElementById("rows");
  const changed = new Set();
  let created = false;

  const filters = () => new URLSearchParams(new FormData(document.querySelector("form.filters")));

  function parse(html) {
    const fresh = new DOMParser().parseFromString(`<table><tbody>${html}</tbody></table>`, "text/html");
    localise(fresh);
    return [...fresh.querySelectorAll("tr[id]")];
  }

  const update = throttled(1, async () => {
    const ids = [...changed].filter((id) => document.getElementById(`job-${id}`));
    const fresh = created;
    changed.clear();
    created = false;
    try {
      if (ids.length) parse(await fetched(`${table.dataset.rows}?ids=${ids.join(",")}`)).forEach(replace);
      if (fresh) parse(await fetched(`${table.dataset.rows}?${filters()}`)).reverse().forEach(insert);
    } catch { /* the next event tries again */ }
  });

  function replace(row) {
    const old = document.getElementById(row.id);
    if (!old || old.innerHTML === row.innerHTML) return;
    const focused = old.contains(document.activeElement);
    old.replaceWith(row);
    if (focused) row.querySelector("a")?.focus({ preventScroll: true });
  }

  function insert(row) {
    if (document.getElementById(row.id)) return replace(row);
    rows.querySelector("tr.none")?.remove();
    row.classList.add("new");
    rows.prepend(row);
  }

  document.addEventListener("live:frame", ({ detail: frame }) => {
    if (frame.event === "resync") created = true;
    else if (frame.channel !== "jobs" || frame.seq === 0) return; // a snapshot says what the page already shows
    else if (frame.event === "job:created") created = true;
    else changed.add(frame.data.id);
    update();
  });

  /* Progress of running jobs is no event of this channel: their rows are asked for now and then. */
  setInterval(() => {
    if (document.hidden) return;
    for (const place of rows.querySelectorAll("[data-progress]")) changed.add(place.dataset.progress);
    if (changed.size) update();
  }, 3000);
  document.addEventListener("live:again", () => {
    created = true;
    for (const row of rows.querySelectorAll("tr[id]")) changed.add(row.id.slice(4));
    update();
  });
})();
