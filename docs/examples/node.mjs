// Trains the digits in Node: node docs/examples/node.mjs [onnxruntime-node or onnxruntime-web] [FOLDER]
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { train } from "./training.mjs";

const [name = "onnxruntime-node", folder = "."] = process.argv.slice(2);
const ort = await import(name);
if (ort.env.wasm) ort.env.wasm.numThreads = 1;
const options = { intraOpNumThreads: 1, ...(name === "onnxruntime-web" && { executionProviders: ["wasm"] }) };
const { losses, accuracy, file } = await train(ort, async (file) => readFileSync(join(folder, file)), options);
for (const loss of losses) console.log(loss);
console.log("accuracy", accuracy);
writeFileSync(join(folder, "digits-trained.safetensors"), Buffer.concat(file.map((part) => Buffer.from(part.buffer, part.byteOffset, part.byteLength))));
