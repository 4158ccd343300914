// The safetensors format and tensors of ONNX Runtime.
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;
import java.util.regex.*;

class Safetensors {
  static final OrtEnvironment ENVIRONMENT = OrtEnvironment.getEnvironment();
  static final String ENTRY =
      "\"([^\"]+)\":\\{\"dtype\":\"(\\w+)\",\"shape\":\\[([\\d,]*)\\],\"data_offsets\":\\[(\\d+),(\\d+)\\]\\}";

  record Tensor(boolean isFloat, ByteBuffer data, long[] shape) {
    OnnxTensor value() throws OrtException {
      var bytes = data.duplicate().order(ByteOrder.LITTLE_ENDIAN);
      return isFloat ? OnnxTensor.createTensor(ENVIRONMENT, bytes.asFloatBuffer(), shape)
          : OnnxTensor.createTensor(ENVIRONMENT, bytes.asLongBuffer(), shape);
    }
    Tensor part(int index, int size) {
      int length = (int) (data.limit() / shape[0] * size);
      long[] sizes = shape.clone();
      sizes[0] = size;
      return new Tensor(isFloat, data.slice(index * length, length), sizes);
    }
  }

  static String read(Path path, Map<String, Tensor> tensors) throws IOException {
    var content = ByteBuffer.wrap(Files.readAllBytes(path)).order(ByteOrder.LITTLE_ENDIAN);
    int length = (int) content.getLong(0);
    String header = new String(content.array(), 8, length, StandardCharsets.UTF_8);
    for (var m : Pattern.compile(ENTRY).matcher(header).results().toList()) {
      int first = Integer.parseInt(m.group(4)), last = Integer.parseInt(m.group(5));
      long[] shape = Arrays.stream(m.group(3).split(",")).filter(s -> !s.isEmpty()).mapToLong(Long::parseLong).toArray();
      tensors.put(m.group(1), new Tensor(m.group(2).equals("F32"), content.slice(8 + length + first, last - first), shape));
    }
    return header.replace("\\", "");
  }
}
