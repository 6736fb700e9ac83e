// Search runs in a web worker, which browsers refuse to pages opened from a disk. There a hidden
// frame takes the worker's place: it loads the same script and exchanges the same messages.
(function () {
  "use strict";

  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.onerror = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      this.loaded = new Promise((resolve) => {
        const page = this.inside.document;
        page.open();
        page.write("<!doctype html><html><head></head><body></body></html>");
        page.close();
        this.inside.postMessage = (data) => this.receive(data);
        this.inside.importScripts = (...urls) => this.load(urls);
        this.load([url]).then(resolve);
      });
    }

    receive(data) {
      const message = new MessageEvent("message", { data });
      this.dispatchEvent(message);
      if (this.onmessage) this.onmessage(message);
    }

    get inside() {
      return this.frame.contentWindow;
    }

    // One script after the other, as importScripts does.
    load(urls) {
      return urls.reduce((before, url) => before.then(() => new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = reject;
        this.inside.document.head.appendChild(script);
      })), Promise.resolve());
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  }

  // The search looks for this name.
  window.IFrameWorker = FrameWorker;
  if (location.protocol === "file:") window.Worker = FrameWorker;
})();
