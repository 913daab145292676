"use strict";
// Asks the server every few seconds whether the run has more to show, and puts it in place: the scroll position stays.
(() => {
  let shown = document.currentScript.dataset.version;

  async function text(path) {
    const answer = await fetch(path, { cache: "no-store" });
    if (!answer.ok) throw new Error(path + ": " + answer.status);
    return answer.text();
  }

  function replace(page) {
    for (const plot of document.querySelectorAll(".plot")) Plotly.purge(plot);
    document.querySelector("main").replaceWith(page.querySelector("main"));
    document.getElementById("figures").textContent = page.getElementById("figures").textContent;
    document.dispatchEvent(new Event("segtrain:new-figures"));
  }

  async function look() {
    try {
      const version = await text("/version");
      if (version === shown) return;
      if (!document.documentElement.dataset.charts) return location.reload(); // nothing was drawn yet
      replace(new DOMParser().parseFromString(await text("/"), "text/html"));
      shown = version;
    } catch (error) {
      console.debug("segtrain report --follow has ended, or is busy: " + error);
    }
  }

  async function watch() {
    await look();
    setTimeout(watch, 1000 * {{seconds}});
  }
  setTimeout(watch, 1000 * {{seconds}});
})();
