(async () => {
const unpacked = name => {
  const packed = Uint8Array.from(atob(document.getElementById(name).textContent), letter => letter.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
};
const library = document.createElement("script");
library.textContent = await unpacked("plotly");
document.head.append(library);
const figures = JSON.parse(await unpacked("figures"));
const config = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"],
  toImageButtonOptions: {format: "svg"}};
const draw = place => {
  const plot = document.getElementById(`figure-${place}`);
  if (!plot.data) Plotly.newPlot(plot, figures[place].data, figures[place].layout, config);
};
figures.forEach((_, place) => { if (!document.getElementById(`figure-${place}`).closest("[hidden]")) draw(place); });
document.querySelectorAll(".choices select").forEach(select => select.addEventListener("change", () => {
  select.closest(".choices").querySelectorAll(".choice").forEach(
    choice => { choice.hidden = !choice.querySelector(`#figure-${select.value}`); });
  draw(Number(select.value));
}));
})();
