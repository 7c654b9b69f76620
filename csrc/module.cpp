// `import knit_data._C` needs a module; this one is empty. Loading it registers the kernels of the other files
// with the dispatcher, under the schemas that Python defines in src/knit_data/ops/.
#include <Python.h>

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C(void) {
  static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
