/* Toasts: what happens to one's own jobs and to the cards while a page is open. At most three, each for 8 s. */
(() => {
  "use strict";
  const stack = document.querySelector(".toasts");
  const SECONDS = 8, MOST = 3;
  const ENDED = { succeeded: "succeeded", failed: "failed", refused: "was refused", cancelled: "was cancelled" };
  const known = new Map(); // job -> the state that was last heard of

  function toast(tone, name, words, href) {
    const item = Object.assign(document.createElement("p"), { className: `toast ${tone}` });
    const link = Object.assign(document.createElement("a"), { href, textContent: name });
    item.append(link, ` ${words}`);
    stack.append(item);
    while (stack.children.length > MOST) stack.firstElementChild.remove();
    let left = setTimeout(() => item.remove(), SECONDS * 1000);
    item.addEventListener("pointerenter", () => clearTimeout(left)); // somebody reads it
    item.addEventListener("pointerleave", () => { left = setTimeout(() => item.remove(), SECONDS * 1000); });
  }

  /** What to say of a state; nothing of those that are no end. */
  function said(job) {
    const why = job.failure_reason ? `: ${job.failure_reason.replaceAll("_", " ")}` : "";
    if (job.status === "held") return job.failure_reason === "input_failed" ? "is held: a job that it waits for did not succeed" : "";
    return ENDED[job.status] ? `${ENDED[job.status]}${why}` : "";
  }

  function ofJob(frame) {
    const job = frame.data, before = known.get(job.id);
    known.set(job.id, job.status);
    if (!frame.seq || job.owner !== stack.dataset.user || before === job.status) return; // a snapshot tells no news
    const name = job.name || `${job.kind} ${job.id.replaceAll("-", "").slice(-6)}`;
    const tone = { succeeded: "good", cancelled: "" }[job.status] ?? "bad";
    if (said(job)) toast(tone, name, said(job), `/jobs/${job.id}/`);
  }

  document.addEventListener("live:frame", ({ detail: frame }) => {
    if (frame.channel === "jobs") ofJob(frame);
    if (frame.event === "gpu:lost") toast("bad", "A card", `of ${frame.data.host} was lost${frame.data.detail ? `: ${frame.data.detail}` : ""}`, `/cards/${frame.data.uuid}/`);
  });
})();
