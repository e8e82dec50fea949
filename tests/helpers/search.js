// The search of the docs, as a page runs it: node search.js WORKER INDEX QUERY...; prints the places found by query.
const fs = require("fs");
let answer = null, handler = null;
globalThis.self = globalThis;
globalThis.addEventListener = (name, listener) => { handler = listener; };
globalThis.postMessage = (message) => { answer = message; };
const [worker, index, ...queries] = process.argv.slice(2);
(0, eval)(fs.readFileSync(worker, "utf-8"));
(async () => {
  const {config, docs} = JSON.parse(fs.readFileSync(index, "utf-8"));
  await handler({data: {type: 0, data: {config, docs, options: {suggest: false}}}});
  const found = {};
  for (const query of queries) {
    await handler({data: {type: 2, data: query}});
    found[query] = answer.data.items.map((pages) => pages.map((item) => item.location));
  }
  console.log(JSON.stringify(found));
})();
