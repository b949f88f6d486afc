/* The readings behind the charts: one window, equal steps, one time axis for all cards.
 *
 * Filled from the server's history when the page opens and when another window is chosen; frames carry it on: a step
 * under way takes readings in, the next one is appended, the first one goes. Where steps were missed (a lost
 * connection, a sleeping laptop) what the server has of them is fetched. `null` is a gap. */
window.mistudio.history = (address, sample) => {
  "use strict";
  const { fetched, known, throttled } = window.mistudio;
  const NAMES = { utilization: "utilization_gpu_percent", memory: "memory_used_bytes", temperature: "temperature_celsius", power: "power_draw_watts" };
  const MIB = 2 ** 20;
  const POINTS = 300; // as in monitor/curves.py
  const AGAIN_SECONDS = [2, 5, 10, 30];
  const times = []; // starts of the steps, in seconds since 1970
  const cards = new Map(); // uuid -> {utilization: {mean, min, max, count}, …}, each as long as `times`
  let minutes = 0, step = 0; // seconds, the second
  let offset = (Date.now() - performance.now()) / 1000; // until the server says what time it is
  let asked = 0, tries = 0, retryAt = 0; // of the request in flight
  let missedFrom = null; // since when steps may lack readings that the server has

  /** Now, by the server's clock, in seconds. Carried on by the page's own uptime: that clock nobody sets. */
  const now = () => performance.now() / 1000 + offset;
  const url = (more = "") => `${address}${address.includes("?") ? "&" : "?"}minutes=${minutes}${more}`;
  const told = () => document.dispatchEvent(new CustomEvent("history:changed"));

  /* From the server ------------------------------------------------------------------------------------- */
  async function load(wanted) {
    const mine = ++asked;
    if (wanted !== minutes) tries = 0;
    minutes = wanted;
    try {
      const answer = JSON.parse(await fetched(url()));
      if (mine !== asked) return;
      tries = retryAt = 0;
      begin(answer.step);
      take(answer);
    } catch {
      if (mine !== asked) return;
      if (!tries) begin(Math.max(2 * sample, 60 * minutes / POINTS)); // what comes live is shown meanwhile
      again(mine);
    }
    told();
  }

  function again(mine) {
    const seconds = AGAIN_SECONDS[Math.min(tries++, AGAIN_SECONDS.length - 1)];
    retryAt = Date.now() + 1000 * seconds;
    setTimeout(() => mine === asked && load(minutes), 1000 * seconds);
  }

  /** The end of the window anew, from the last step that is surely whole. */
  const refresh = throttled(3, async () => {
    if (!step || tries) return load(minutes);
    const mine = asked, since = missedFrom ?? (times.at(-2) ?? now() - 60 * minutes);
    missedFrom = null;
    try {
      const answer = JSON.parse(await fetched(url(`&since=${since.toFixed(1)}`)));
      if (mine === asked && answer.step === step) take(answer);
    } catch { missedFrom = since; /* the next occasion tries again */ }
    told();
  });

  function begin(seconds) {
    step = seconds;
    times.length = 0;
    cards.clear();
    missedFrom = null;
  }

  /** What the server says wins; where it says nothing, what frames brought stays. */
  function take(answer) {
    offset = answer.now - performance.now() / 1000;
    if (times.at(-1) > now() + 2 * step) return load(minutes); // the server's clock was ahead, and is set right
    if (!times.length) times.push(answer.start);
    reach(answer.start + (answer.count - 1) * step, true);
    const first = Math.round((answer.start - times[0]) / step);
    for (const uuid in answer.cards) {
      for (const name in NAMES) if (answer.cards[uuid][name]) overlay(of(uuid)[name], answer.cards[uuid][name], first);
    }
  }

  function overlay(series, { mean, min = mean, max = mean }, first) {
    mean.forEach((value, n) => {
      const at = first + n;
      if (value === null || at < 0 || at >= times.length) return;
      series.mean[at] = value;
      series.min[at] = min[n];
      series.max[at] = max[n];
      if (at === times.length - 1) series.count = Math.max(1, Math.round((now() - times[at]) / sample));
    });
  }

  /* From frames ----------------------------------------------------------------------------------------- */
  function add(readings) {
    if (!step) return;
    for (const card of readings) {
      if (card.stale) continue;
      const at = now() - (card.age_s ?? 0);
      if (!times.length) times.push(at - (at % step));
      reach(at);
      const newest = times.length - 1;
      if (at < times[newest]) continue;
      for (const name in NAMES) put(of(card.uuid)[name], newest, value(card, name));
    }
  }

  const value = (card, name) => {
    const said = card[NAMES[name]];
    return known(said) ? (name === "memory" ? said / MIB : said) : null;
  };

  function put(series, n, said) {
    if (said === null) return;
    series.mean[n] = series.count ? series.mean[n] + (said - series.mean[n]) / (series.count + 1) : said;
    series.min[n] = series.count ? Math.min(series.min[n], said) : said;
    series.max[n] = series.count ? Math.max(series.max[n], said) : said;
    series.count += 1;
  }

  /** Steps up to the one that holds `at`. Those in between held nothing that we heard of. */
  function reach(at, asServerSays = false) {
    const missing = Math.floor((at - times.at(-1)) / step + 1e-6);
    if (missing > 1 && !asServerSays) {
      missedFrom ??= times.at(-1);
      refresh();
    }
    if (missing > 4 * POINTS) { // a day of sleep: nothing of the window is left
      const from = times.at(-1) + missing * step;
      times.length = 0;
      cards.clear();
      times.push(from);
      return;
    }
    for (let n = 0; n < missing; n++) append(times.at(-1) + step);
    while (times.length > 2 && times[1] < now() - 60 * minutes) forgetFirst();
  }

  const everySeries = function* () { for (const card of cards.values()) for (const name in NAMES) yield card[name]; };

  function append(time) {
    times.push(time);
    for (const series of everySeries()) {
      series.count = 0;
      for (const part of PARTS) series[part].push(null);
    }
  }

  function forgetFirst() {
    times.shift();
    for (const series of everySeries()) for (const part of PARTS) series[part].shift();
  }

  const PARTS = ["mean", "min", "max"];
  const blank = () => Object.fromEntries([...PARTS.map((part) => [part, Array(times.length).fill(null)]), ["count", 0]]);

  function of(uuid) {
    if (!cards.has(uuid)) cards.set(uuid, Object.fromEntries(Object.keys(NAMES).map((name) => [name, blank()])));
    return cards.get(uuid);
  }

  /* For the page ---------------------------------------------------------------------------------------- */
  const range = () => [now() - 60 * minutes, now()];

  /** The time of the first reading that is shown; `null` where there is none. */
  function begins() {
    const some = (n) => [...cards.values()].some((card) => Object.keys(NAMES).some((name) => card[name].mean[n] !== null));
    const first = times.findIndex((_, n) => some(n));
    return first < 0 ? null : times[first];
  }

  /** One sentence where the window is not what was asked for. */
  function says() {
    if (retryAt) return `history does not answer: what comes live is shown, asked again in ${Math.max(0, Math.ceil((retryAt - Date.now()) / 1000))} s`;
    if (!step) return "";
    const first = begins();
    if (first === null) return "no reading in this time";
    return first > now() - 60 * minutes + 3 * step ? `readings since ${when(first)}` : "";
  }

  /** A time of the axis: within a day by the clock, in longer windows with its day. */
  function when(seconds) {
    const at = new Date(seconds * 1000), clock = at.toLocaleTimeString([], { hour12: false });
    if (minutes < 1440) return clock;
    return `${at.toLocaleDateString([], { day: "numeric", month: "short" })} ${clock.slice(0, 5)}`;
  }

  document.addEventListener("live:again", () => refresh());
  document.addEventListener("live:frame", ({ detail: frame }) => frame.event === "resync" && refresh());
  document.addEventListener("visibilitychange", () => step && !document.hidden && refresh());
  setInterval(() => step >= 60 && !document.hidden && refresh(), 60_000); // long steps are counted by the server

  return { load, refresh, add, range, now, says, when, times, series: (uuid, name) => cards.get(uuid)?.[name], get minutes() { return minutes; } };
};
