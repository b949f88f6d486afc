/* Toasts: what happens to one's own jobs and to the cards while a page is open. At most three, each for 8 s.
   What one broken link holds shares a toast, or it would push away that of the link itself. */
(() => {
  "use strict";
  const stack = document.querySelector(".toasts");
  const SECONDS = 8, MOST = 3;
  const ENDED = { succeeded: "succeeded", failed: "failed", refused: "was refused", cancelled: "was cancelled" };
  const known = new Map(); // job -> the state that was last heard of
  let held = { item: null, count: 0 }; // the toast of held jobs, and how many it tells of

  function toast(tone, name, words, href) {
    const item = Object.assign(document.createElement("p"), { className: `toast ${tone}` });
    write(item, name, words, href);
    stack.append(item);
    while (stack.children.length > MOST) stack.firstElementChild.remove();
    let left = setTimeout(() => item.remove(), SECONDS * 1000);
    item.addEventListener("pointerenter", () => clearTimeout(left)); // somebody reads it
    item.addEventListener("pointerleave", () => { left = setTimeout(() => item.remove(), SECONDS * 1000); });
    return item;
  }

  function write(item, name, words, href) {
    item.replaceChildren(Object.assign(document.createElement("a"), { href, textContent: name }), ` ${words}`);
  }

  function toastOfHeld(name, href) {
    if (held.item?.isConnected) {
      held.count += 1;
      write(held.item, `${held.count} jobs`, "are held: a job that they wait for did not succeed", "/jobs/?status=held&mine=1");
    } else held = { item: toast("bad", name, "is held: a job that it waits for did not succeed", href), count: 1 };
  }

  /** What to say of a state; nothing of those that are no end. */
  function said(job) {
    const why = job.failure_reason ? `: ${job.failure_reason.replaceAll("_", " ")}` : "";
    return ENDED[job.status] ? `${ENDED[job.status]}${why}` : "";
  }

  function ofJob(frame) {
    const job = frame.data, before = known.get(job.id);
    known.set(job.id, job.status);
    if (!frame.seq || job.owner !== stack.dataset.user || before === job.status) return; // a snapshot tells no news
    const name = job.name || `${job.kind} ${job.id.replaceAll("-", "").slice(-6)}`;
    const tone = { succeeded: "good", cancelled: "" }[job.status] ?? "bad";
    if (job.status === "held" && job.failure_reason === "input_failed") toastOfHeld(name, `/jobs/${job.id}/`);
    else if (said(job)) toast(tone, name, said(job), `/jobs/${job.id}/`);
  }

  document.addEventListener("live:frame", ({ detail: frame }) => {
    if (frame.channel === "jobs") ofJob(frame);
    if (frame.event === "gpu:lost") toast("bad", "A card", `of ${frame.data.host} was lost${frame.data.detail ? `: ${frame.data.detail}` : ""}`, `/cards/${frame.data.uuid}/`);
  });
})();
