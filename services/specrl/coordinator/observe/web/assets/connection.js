// The page's connection to the coordinator: JSON by fetch, and one stream of server-sent events that is always reopened.
//
//   CONNECTING -> LIVE --stream ends, or is silent for SILENCE_MS--> LOST --pause, doubled each time--> CONNECTING
//
// The stream is read with fetch, because EventSource cannot send a token.

const SILENCE_MS = 40000; // the coordinator sends at least a comment every 15 s
const FIRST_PAUSE_MS = 500, LONGEST_PAUSE_MS = 5000;

export class Refused extends Error {}

export class Connection {
  constructor({ onBeat, onEvent, onState, onRefused }) {
    Object.assign(this, { onBeat, onEvent, onState, onRefused });
    this.lastEventId = "";
    this.token = sessionStorage.getItem("token") ?? "";
    this.takeTokenOfAddress();
    addEventListener("hashchange", () => this.takeTokenOfAddress());
  }

  // The terminal prints the page's address with the token of the run. It must not stay in the address bar.
  takeTokenOfAddress() {
    const found = new URLSearchParams(location.hash.slice(1)).get("token");
    if (found) {
      this.useToken(found);
      history.replaceState(null, "", location.pathname + location.search);
    }
  }

  useToken(token) {
    this.token = token;
    sessionStorage.setItem("token", token);
  }

  headers() {
    return this.token ? { Authorization: `Bearer ${this.token}` } : {};
  }

  async get(path, kind = "json") {
    const answer = await fetch(path, { headers: this.headers(), signal: AbortSignal.timeout(20000) });
    if (answer.status === 401 || answer.status === 403) throw new Refused((await answer.json()).detail);
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return kind === "json" ? answer.json() : answer.text();
  }

  async run() {
    let pause = FIRST_PAUSE_MS;
    for (;;) {
      let reason = "the coordinator does not respond";
      try {
        await this.read(() => { pause = FIRST_PAUSE_MS; });
      } catch (error) {
        if (error instanceof Refused) {
          this.onState("lost", error.message);
          await this.onRefused(error.message);
          continue;
        }
        if (error.reason) reason = error.reason;
      }
      this.onState("lost", reason);
      await new Promise((done) => setTimeout(done, pause));
      pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
    }
  }

  async read(onFirst) {
    const abort = new AbortController();
    let watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
    try {
      const headers = { ...this.headers(), ...(this.lastEventId && { "Last-Event-ID": this.lastEventId }) };
      const answer = await fetch("/stream", { headers, signal: abort.signal, cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) throw new Refused((await answer.json()).detail);
      if (!answer.ok) throw Object.assign(new Error(), { reason: `the coordinator responds with status ${answer.status}` });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        clearTimeout(watchdog);
        watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
        text += value;
        const blocks = text.split("\n\n");
        text = blocks.pop(); // the last block may be incomplete
        for (const block of blocks) this.take(block);
        onFirst();
      }
    } finally {
      clearTimeout(watchdog);
    }
  }

  take(block) {
    const found = { event: "message", data: "" };
    for (const line of block.split("\n")) {
      const at = line.indexOf(":");
      if (at > 0) found[line.slice(0, at)] = line.slice(at + 1).trimStart();
    }
    if (found.id) this.lastEventId = found.id;
    if (found.event === "beat") {
      this.onState("live", "");
      this.onBeat(JSON.parse(found.data));
    } else if (found.event === "happened") {
      this.onEvent(JSON.parse(found.data));
    }
  }
}

// Returns a function that calls `work` at most once per `everyMs` and never concurrently. A call in between is not lost:
// it leads to one more call afterwards.
export function throttled(work, everyMs) {
  let isBusy = false, isAsked = false;
  return async function ask() {
    if (isBusy) { isAsked = true; return; }
    isBusy = true;
    const began = performance.now();
    try { await work(); } catch { /* the stream shows that the connection is lost, and the next beat retries */ }
    const rest = Math.max(0, everyMs - (performance.now() - began));
    setTimeout(() => { isBusy = false; if (isAsked) { isAsked = false; ask(); } }, rest);
  };
}
