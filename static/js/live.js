/* Live: one socket per page, and the parts of the page that the server draws again.
 *
 * <main data-channels="jobs system/gpus" data-parts="/parts/" data-refetch="job:changed" data-every="4">
 * Every frame becomes a DOM event `live:frame`. Events named in `data-refetch` fetch `data-parts`, and each element
 * with `data-part` whose HTML changed is replaced in place. An event is a nudge; the row is the truth. */
window.mistudio = (() => {
  "use strict";
  const main = document.querySelector("main");
  const dot = document.querySelector(".live");
  const words = (value) => (value || "").split(" ").filter(Boolean);

  /* Numbers as the server writes them (monitor/templatetags/show.py) ------------------------------------ */
  const DASH = "–";
  const known = (value) => value !== null && value !== undefined && Number.isFinite(Number(value));
  const whole = (value) => (known(value) ? grouped(Math.round(value)) : DASH);
  const grouped = (value) => String(value).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
  const written = { gib: (value) => gib(value), text: (value) => value || DASH, list: (value) => (value ? value.join(", ").replaceAll("_", " ") || "none" : DASH) };
  const gib = (bytes) => (known(bytes) ? (bytes / 2 ** 30).toFixed(1) : DASH);

  function size(bytes) {
    if (!known(bytes)) return DASH;
    let value = Number(bytes);
    for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
      if (value < 1024 || unit === "TiB") return `${unit === "B" || value >= 100 ? Math.round(value) : value.toFixed(1)} ${unit}`;
      value /= 1024;
    }
  }

  function duration(seconds) {
    if (!known(seconds)) return DASH;
    const s = Math.round(seconds);
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.round(s / 60)} min`;
    if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
  }

  /** Times in the reader's own zone: today by the clock, earlier with the day. */
  function localise(place) {
    for (const element of place.querySelectorAll("time[datetime]")) {
      const at = new Date(element.dateTime);
      const day = { day: "numeric", month: "short", ...(at.getFullYear() === new Date().getFullYear() ? {} : { year: "numeric" }) };
      const clock = at.toLocaleTimeString([], { hour12: false });
      element.title = at.toLocaleString();
      element.textContent = at.toDateString() === new Date().toDateString() ? clock : `${at.toLocaleDateString([], day)} ${clock.slice(0, 5)}`;
    }
  }

  /* Parts ----------------------------------------------------------------------------------------------- */
  const drawn = new WeakMap(); // element -> the HTML that the server last sent for it

  function patch(html) {
    const fresh = new DOMParser().parseFromString(html, "text/html");
    for (const part of fresh.querySelectorAll("[data-part]")) {
      const old = document.querySelector(`[data-part="${CSS.escape(part.dataset.part)}"]`);
      if (old) replace(old, part);
    }
    document.dispatchEvent(new CustomEvent("live:patched", { detail: fresh }));
  }

  /** A CSRF token is another one in every answer, and means the same. */
  const plain = (html) => html.replace(/name="csrfmiddlewaretoken" value="\w+"/g, "");

  function replace(old, part) {
    if (old.className !== part.className) old.className = part.className;
    if (plain(drawn.get(old) ?? old.innerHTML) === plain(part.innerHTML)) return;
    if (old.querySelector(":popover-open")) return; // somebody is reading it; the next answer replaces it
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    const opened = [...old.querySelectorAll("details")].map((details) => details.open);
    drawn.set(old, part.innerHTML);
    old.replaceChildren(...part.childNodes);
    localise(old);
    old.querySelectorAll("details").forEach((details, n) => { details.open = opened[n] ?? details.open; });
    if (focused) refocus(old, focused);
  }

  function refocus(part, before) {
    const href = before.getAttribute("href");
    const same = before.id ? document.getElementById(before.id) : href && part.querySelector(`[href="${CSS.escape(href)}"]`);
    if (same) same.focus({ preventScroll: true });
  }

  async function fetched(url) {
    const answer = await fetch(url, { headers: { "X-Requested-With": "fetch" } });
    if (answer.redirected && new URL(answer.url).pathname.startsWith("/signin")) location.reload();
    if (!answer.ok) throw new Error(`${url}: ${answer.status}`);
    return answer.text();
  }

  /** At most one call per `seconds`; the last one asked for always happens. */
  function throttled(seconds, action) {
    let due = null, last = -Infinity;
    return () => {
      if (due) return;
      due = setTimeout(() => { due = null; last = performance.now(); action(); },
        Math.max(50, last + seconds * 1000 - performance.now()));
    };
  }

  const refetch = throttled(1, async () => {
    if (!main.dataset.parts) return;
    try { patch(await fetched(main.dataset.parts)); } catch { /* the next event or the next tick tries again */ }
  });

  /* Socket ---------------------------------------------------------------------------------------------- */
  const channels = new Set(words(main?.dataset.channels)); // those of this page
  const everywhere = ["system/gpus", "jobs"]; // the line of all cards, and what is told of one's own jobs
  let socket = null, tries = 0, retryAt = 0, wasOpen = false;
  let receivedAt = 0, ageThen = 0; // the last reading of the cards: when it came, how old it was

  function connect() {
    socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/ws/`);
    socket.onopen = opened;
    socket.onmessage = (message) => received(JSON.parse(message.data));
    socket.onclose = closed;
  }

  function opened() {
    tries = retryAt = 0;
    for (const channel of new Set([...channels, ...everywhere])) send("subscribe", channel);
    if (wasOpen) again();
    wasOpen = true;
    showAge();
  }

  /** After a lost connection: what happened meanwhile is in the rows. */
  function again() {
    refetch();
    document.dispatchEvent(new CustomEvent("live:again"));
  }

  /** Full jitter between 1 s and twice as much each time, 30 s at most: a restart is not met by a stampede. */
  function closed() {
    const wait = 1 + Math.random() * (Math.min(30, 2 ** ++tries) - 1);
    retryAt = Date.now() + wait * 1000;
    setTimeout(connect, wait * 1000);
    showAge();
  }

  function send(action, channel) {
    if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ action, channel }));
  }

  function received(frame) {
    if (frame.channel === "system/gpus" && frame.event === "system:metrics") readings(frame.data);
    if (frame.event === "resync" || (channels.has(frame.channel) && words(main.dataset.refetch).includes(frame.event))) refetch();
    document.dispatchEvent(new CustomEvent("live:frame", { detail: frame }));
  }

  function readings(data) {
    receivedAt = Date.now();
    ageThen = Math.min(...data.gpus.map((card) => card.age_s ?? 0), Infinity);
    if (!Number.isFinite(ageThen)) ageThen = 0;
    fill(document.querySelector(".strip"), data.aggregate);
    showAge();
  }

  /** Write `values` into the elements that name them: data-field="…", in the unit that data-as names. */
  function fill(place, values) {
    for (const element of place?.querySelectorAll("[data-field]") ?? []) {
      const text = (written[element.dataset.as] ?? whole)(values[element.dataset.field]);
      if (element.textContent !== text) element.textContent = text;
    }
  }

  /* Age of the data ------------------------------------------------------------------------------------- */
  function showAge() {
    if (!dot) return;
    const age = receivedAt ? Math.floor(ageThen + (Date.now() - receivedAt) / 1000) : null;
    const limit = Math.max(2, 3 * Number(main.dataset.sample || 2));
    if (retryAt) return say("lost", `connection lost, trying again in ${Math.max(0, Math.ceil((retryAt - Date.now()) / 1000))} s`);
    if (age === null) return say("connecting", "connecting");
    if (age > limit) return say("stale", `updated ${duration(age)} ago`);
    say("live", `live, ${age} s`);
  }

  function say(state, text) {
    dot.dataset.state = state;
    if (dot.textContent !== text) dot.textContent = text;
  }

  /* Small things that every page has -------------------------------------------------------------------- */
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const source = document.querySelector(button.dataset.copy);
    navigator.clipboard?.writeText(source ? source.textContent : button.dataset.copy);
    const before = button.textContent;
    button.textContent = "copied";
    setTimeout(() => { button.textContent = before; }, 1200);
  });

  // Before anything on the page is drawn or rewritten: what the server sent is what later answers compare with.
  for (const part of document.querySelectorAll("[data-part]")) drawn.set(part, part.innerHTML);
  localise(document);
  document.addEventListener("htmx:afterSwap", ({ detail }) => localise(detail.target));
  if (dot && main) {
    channels.add("system/gpus");
    connect();
    setInterval(showAge, 1000);
    if (main.dataset.every) setInterval(() => document.hidden || refetch(), main.dataset.every * 1000);
    document.addEventListener("visibilitychange", () => document.hidden || refetch());
  }
  return { localise, patch, fetched, refetch, throttled, fill, whole, grouped, gib, size, duration, known, DASH };
})();
