/* Jobs: rows change in place; a new job appears on top; the line of a group opens. Nothing reorders. */
(() => {
  "use strict";
  const { fetched, throttled, localise } = window.mistudio;
  const table = document.querySelector("[data-rows]");
  const rows = document.getElementById("rows");
  const changed = new Set(); // ids of rows: job-…, group-…
  let created = false;

  const filters = () => new URLSearchParams(new FormData(document.querySelector("form.filters")));

  function parse(html) {
    const fresh = new DOMParser().parseFromString(`<table><tbody>${html}</tbody></table>`, "text/html");
    localise(fresh);
    return [...fresh.querySelectorAll("tr[id]")];
  }

  const update = throttled(1, async () => {
    const there = [...changed].filter((id) => document.getElementById(id));
    const fresh = created;
    changed.clear();
    created = false;
    try {
      for (const [prefix, asked] of [["job-", "ids"], ["group-", "groups"]]) {
        const ids = there.filter((id) => id.startsWith(prefix)).map((id) => id.slice(prefix.length));
        if (ids.length) parse(await fetched(`${table.dataset.rows}?${asked}=${ids.join(",")}`)).forEach(replace);
      }
      if (fresh) parse(await fetched(`${table.dataset.rows}?${filters()}`)).reverse().forEach(insert);
    } catch { /* the next event tries again */ }
  });

  function replace(row) {
    const old = document.getElementById(row.id);
    if (!old) return;
    const focused = old.contains(document.activeElement) && document.activeElement.localName;
    row.classList.toggle("member", old.classList.contains("member"));
    if (isOpen(old)) show(row, true);
    if (old.innerHTML === row.innerHTML) return;
    old.replaceWith(row);
    if (focused) row.querySelector(focused)?.focus({ preventScroll: true });
  }

  /* A group opens: its jobs stand below its line -------------------------------------------------------- */
  const opener = (row) => row.querySelector("[data-open-group]");
  const isOpen = (row) => opener(row)?.getAttribute("aria-expanded") === "true";
  const show = (row, open) => { opener(row).setAttribute("aria-expanded", String(open)); opener(row).textContent = open ? "▾" : "▸"; };

  rows.addEventListener("click", async ({ target }) => {
    const button = target.closest("[data-open-group]");
    if (!button) return;
    const row = button.closest("tr"), open = !isOpen(row);
    show(row, open);
    if (!open) return close(row);
    const members = parse(await fetched(`${table.dataset.rows}?group=${button.dataset.openGroup}`));
    for (const member of members) member.classList.add("member");
    close(row);
    document.getElementById(row.id).after(...members);
  });

  function close(row) {
    for (let next = document.getElementById(row.id).nextElementSibling; next?.classList.contains("member");) {
      const member = next;
      next = next.nextElementSibling;
      member.remove();
    }
  }

  function insert(row) {
    if (document.getElementById(row.id)) return replace(row);
    rows.querySelector("tr.none")?.remove();
    row.classList.add("new");
    rows.prepend(row);
  }

  function note({ id, group_id: group }) {
    changed.add(`job-${id}`);
    if (group) changed.add(`group-${group}`);
  }

  document.addEventListener("live:frame", ({ detail: frame }) => {
    if (frame.event === "resync") created = true;
    else if (frame.channel !== "jobs" || frame.seq === 0) return; // a snapshot says what the page already shows
    else if (frame.event === "job:created") created = true;
    else note(frame.data);
    update();
  });

  /* Progress of running jobs is no event of this channel: their rows are asked for now and then. */
  setInterval(() => {
    if (document.hidden) return;
    for (const place of rows.querySelectorAll("[data-progress]")) changed.add(place.closest("tr").id);
    if (changed.size) update();
  }, 3000);
  /* Who comes back to a page that stood open asks what happened since. */
  const AWAY_MS = 30 * 60 * 1000;
  let leftAt = null;
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) leftAt = Date.now();
    else if (leftAt && Date.now() - leftAt > AWAY_MS) location.reload();
  });
  document.addEventListener("live:again", () => {
    created = true;
    for (const row of rows.querySelectorAll("tr[id]")) changed.add(row.id);
    update();
  });
})();
