// Browsers start no worker on pages that are read from disk, and the search needs one. On such pages
// this class runs the worker's script in a hidden frame instead. (Material asks for this name.)
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      this.ready = new Promise((resolve, reject) => {
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inside.importScripts = (...urls) =>
          urls.reduce((before, next) => before.then(() => this.load(frame, next)), Promise.resolve());
        this.load(frame, url).then(() => resolve(inside), reject);
      });
    }
    load(frame, url) {
      return new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script");
        script.src = new URL(url, location.href);
        script.onload = resolve;
        script.onerror = reject;
        frame.contentDocument.body.append(script);
      });
    }
    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
    terminate() {}
  };
  window.Worker = window.IFrameWorker;
}
