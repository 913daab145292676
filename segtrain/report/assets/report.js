"use strict";
// Unpacks plotly.js, which travels compressed in the page, and draws the figures in the page's own colours.
(async () => {
  const plots = () => {
    const figures = JSON.parse(document.getElementById("figures").textContent);
    return Object.keys(figures).map((id) => [document.getElementById(id), figures[id]]);
  };

  async function loadPlotly() {
    const packed = document.getElementById("plotly").textContent;
    const bytes = Uint8Array.from(atob(packed), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: color("--grid"), linecolor: color("--edge"), tickcolor: color("--edge"), showgrid: true };
    return {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--text"), size: 12, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { bgcolor: color("--card"), bordercolor: color("--edge"), font: { color: color("--text") } },
      xaxis: { ...layout.xaxis, ...axis },
      yaxis: { ...layout.yaxis, ...axis },
    };
  }

  function draw() {
    for (const [plot, figure] of plots()) {
      Plotly.react(plot, figure.data, themed(figure.layout), { responsive: true, displaylogo: false, displayModeBar: false });
    }
  }

  try {
    await loadPlotly();
    draw();
    document.addEventListener("segtrain:new-figures", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    document.documentElement.dataset.charts = "drawn";
  } catch (error) {
    for (const [plot] of plots()) plot.textContent = "This chart could not be drawn: " + error;
    console.error(error);
  }
})();
