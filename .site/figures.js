for (const place of document.querySelectorAll(".plot")) {
  const figure = JSON.parse(place.querySelector("script").textContent);
  const config = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"],
    toImageButtonOptions: {format: "svg"}};
  Plotly.newPlot(place, figure.data, figure.layout, config);
}
