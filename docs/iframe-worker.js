// Search without a network. Browsers start no worker for a page that is opened from a file, so this class runs the
// theme's search in a hidden frame. The theme looks for "IFrameWorker"; without it, the theme downloads its own version.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
      const script = frame.contentDocument.createElement("script");
      this.ready = new Promise((done) => { script.onload = done; });
      script.src = url;
      frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", {data})));
    }
  };
}
