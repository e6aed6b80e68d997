// Reads the server-sent stream and comes back when it breaks. Knows HTTP, keys and retries; knows
// nothing of what the messages mean. EventSource cannot send a key, so this is fetch.

const SILENCE_MS = 8000; // the server says something every two seconds at least
const RETRY_MS = [300, 700, 1500, 3000, 5000];
const RETRY_AFTER_END_MS = 3000;
const KEY_NAME = "isinglass-api-key";

/** Header with the key that the reader has given, if any. */
export function authorization() {
  const key = sessionStorage.getItem(KEY_NAME);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Keep a key for as long as the tab lives. */
export function keepKey(key) {
  sessionStorage.setItem(KEY_NAME, key);
}

/** One stream of messages: `onMessage(object)`, and `onState(state, detail)` where state is
 * connecting, live, lost, key, refused or ended. */
export class Stream {
  #url;
  #onMessage;
  #onState;
  #wake = null;
  #hasEnded = false;
  #isWanted = false;

  constructor(url, { onMessage, onState }) {
    this.#url = url;
    this.#onMessage = onMessage;
    this.#onState = onState;
  }

  /** Read until the page is left. */
  async run() {
    for (let attempt = 0; ; ) {
      this.#hasEnded = false;
      let detail = "";
      try {
        const hadData = await this.#readOnce();
        if (hadData) attempt = 0;
      } catch (error) {
        detail = error.userText ?? "";
        if (error.state) this.#onState(error.state, detail);
        if (error.state === "key") {
          await this.#sleep(Infinity);
          attempt = 0;
          continue;
        }
        if (error.state === "refused") {
          await this.#sleep(RETRY_MS.at(-1));
          continue;
        }
      }
      if (this.#hasEnded) {
        await this.#sleep(RETRY_AFTER_END_MS);
        continue;
      }
      this.#onState("lost", detail);
      await this.#sleep(RETRY_MS[Math.min(attempt++, RETRY_MS.length - 1)]);
    }
  }

  /** Try again now, or as soon as what is under way has failed. */
  retry() {
    this.#isWanted = true;
    this.#wake?.();
  }

  async #readOnce() {
    const abort = new AbortController();
    let watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
    let hadData = false;
    try {
      const response = await fetch(this.#url, {
        headers: authorization(),
        cache: "no-store",
        signal: abort.signal,
      });
      if (!response.ok) throw await refusal(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return hadData;
        clearTimeout(watchdog);
        watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
        text += value;
        let end;
        let begin = 0;
        while ((end = text.indexOf("\n\n", begin)) >= 0) {
          const message = JSON.parse(text.slice(begin + "data: ".length, end));
          begin = end + 2;
          if (message.kind === "end") {
            this.#hasEnded = true;
            this.#onState("ended", message.reason);
          } else {
            this.#onMessage(message);
            if (!hadData) this.#onState("live", "");
          }
          hadData = true;
        }
        text = text.slice(begin);
      }
    } finally {
      clearTimeout(watchdog);
      abort.abort();
    }
  }

  async #sleep(ms) {
    if (!this.#isWanted) {
      await new Promise((resolve) => {
        const timer = ms === Infinity ? 0 : setTimeout(resolve, ms);
        this.#wake = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    }
    this.#isWanted = false;
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const error = new Error(`status ${response.status}`);
  error.userText = body?.error?.message ?? `the server answered with status ${response.status}`;
  if (response.status === 401) error.state = "key";
  else if (response.status < 500 || response.status === 503) error.state = "refused";
  return error;
}
