// Trains the digits in Java 17: javac -cp onnxruntime.jar *.java && java -cp onnxruntime.jar:. Train FOLDER
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.io.IOException;
import java.nio.file.Path;
import java.util.*;
import java.util.regex.Pattern;

class Train {
  public static void main(String[] arguments) throws IOException, OrtException {
    var folder = Path.of(arguments[0]);
    Map<String, Safetensors.Tensor> state = new HashMap<>(), data = new HashMap<>();
    String contract = Safetensors.read(folder.resolve("digits-training.safetensors"), state), text = contract.split("\"pairs\": ")[1];
    Safetensors.read(folder.resolve("digits-data.safetensors"), data);
    Map<String, String> pairs = new HashMap<>();
    for (var m : Pattern.compile("\"([^\"]+)\": \"([^\"]+)\"").matcher(text.split("}")[0]).results().toList())
      pairs.put(m.group(1), m.group(2));
    Set<String> fetched = new HashSet<>(pairs.values());
    fetched.add("loss");
    var options = new OrtSession.SessionOptions();
    options.setMemoryPatternOptimization(false);
    options.setIntraOpNumThreads(1);
    var session = Safetensors.ENVIRONMENT.createSession(folder.resolve("digits-training.onnx").toString(), options);
    Map<String, OnnxTensor> feeds = new HashMap<>();
    for (var entry : state.entrySet()) feeds.put(entry.getKey(), entry.getValue().value());
    OrtSession.Result before = null;
    for (int update = 0, size = 32, batches = 1472 / size; update < 3 * batches; update++) {
      Map<String, OnnxTensor> batch = new HashMap<>();
      for (var name : List.of("x", "labels")) batch.put(name, data.get(name).part(update % batches, size).value());
      batch.put("learning_rate", OnnxTensor.createTensor(Safetensors.ENVIRONMENT, 0.003f));
      batch.put("step", OnnxTensor.createTensor(Safetensors.ENVIRONMENT, update + 1L));
      batch.put("draw", OnnxTensor.createTensor(Safetensors.ENVIRONMENT, (long) update));
      feeds.putAll(batch);
      var results = session.run(feeds, fetched);
      batch.values().forEach(OnnxTensor::close);
      for (var pair : pairs.entrySet()) feeds.put(pair.getKey(), (OnnxTensor) results.get(pair.getValue()).orElseThrow());
      System.out.println(((OnnxTensor) results.get("loss").orElseThrow()).getFloatBuffer().get(0));
      if (before != null) before.close();
      before = results;
    }
  }
}
