// The theme searches when a key is released. Text is also pasted, dictated or dropped.
document.addEventListener("input", ({target}) => {
  if (target.matches("[data-md-component=search-query]")) target.dispatchEvent(new Event("keyup"));
});
