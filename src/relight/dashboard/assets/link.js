// The connection to the dashboard's server: events that go on where they broke off, tiles, logs. Reconnects by itself.

const RETRY_MS = [200, 500, 1000, 2000];
const SILENCE_MS = 15000; // the server says something every five seconds

const token = takeToken();

// The token comes after the #, and is kept for reloads of this tab; the address bar does not show it for long.
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  return given ?? sessionStorage.getItem("token") ?? "";
}

function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (token) headers.Authorization = `Bearer ${token}`;
  return fetch(path, { ...options, headers, cache: "no-store" });
}

export async function getBytes(path, signal) {
  const answer = await ask(path, { signal });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.arrayBuffer();
}

export async function getJson(path) {
  const answer = await ask(path);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// Calls onEvent(value) for each event and onState("live" or "lost", why), for ever.
export async function listen(onEvent, onState) {
  let last = "";
  let failures = 0;
  for (;;) {
    let why = "the dashboard cannot be reached";
    const abort = new AbortController();
    let timer = setTimeout(() => abort.abort(), SILENCE_MS);
    try {
      const answer = await ask("/api/events", { headers: last ? { "Last-Event-ID": last } : {}, signal: abort.signal });
      if (!answer.ok) {
        why = (await answer.text()).trim();
        throw new Error(why);
      }
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), SILENCE_MS);
        text += value;
        let end;
        while ((end = text.indexOf("\n\n")) >= 0) {
          const lines = text.slice(0, end).split("\n");
          text = text.slice(end + 2);
          const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
          if (data) onEvent(JSON.parse(data));
          const id = lines.find((line) => line.startsWith("id: "));
          if (id) last = id.slice(4);
          failures = 0;
          onState("live", "");
        }
      }
    } catch {
      // said below
    }
    clearTimeout(timer);
    onState("lost", why);
    await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]));
  }
}
