// Builtins that take nothing or one object, called as Python's interpreter calls those that it has met often: by what
// lies behind the object. The way there, PyObject_CallNoArgs() and its like, takes as long as most of torch's answers.
#pragma once

#include <pybind11/pybind11.h>

#include <cassert>
#include <utility>

namespace ndsoftmax {

namespace py = pybind11;

inline py::object checked(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// A function, or a method as its class has it. Others than builtins are called as any object is.
class Builtin {
 public:
  explicit Builtin(py::object function) : function_(std::move(function)) {
    PyObject* const object = function_.ptr();
    if (PyCFunction_CheckExact(object)) {
      self_ = PyCFunction_GET_SELF(object);
      const PyCFunction address = PyCFunction_GET_FUNCTION(object);
      switch (PyCFunction_GET_FLAGS(object)) {
        case METH_NOARGS: with_none_ = address; break;
        case METH_O: with_one_ = address; break;
        case METH_FASTCALL | METH_KEYWORDS:  // as pybind11's
          with_any_ = reinterpret_cast<WithAny>(reinterpret_cast<void (*)()>(address));
          break;
        default: break;
      }
    } else if (Py_IS_TYPE(object, &PyMethodDescr_Type)) {
      const PyMethodDef* const method = reinterpret_cast<PyMethodDescrObject*>(object)->d_method;
      is_method_ = method->ml_flags == METH_NOARGS;
      if (is_method_) with_one_ = method->ml_meth;
    }
  }

  py::object operator()() const {
    if (with_none_ != nullptr) return checked(with_none_(self_, nullptr));
    if (with_any_ != nullptr) return checked(with_any_(self_, nullptr, 0, nullptr));
    return checked(PyObject_CallNoArgs(function_.ptr()));
  }

  // A method's argument must be of its class.
  py::object operator()(py::handle argument) const {
    PyObject* const one = argument.ptr();
    assert(!is_method_ || PyObject_TypeCheck(one, PyDescr_TYPE(function_.ptr())));
    if (with_one_ != nullptr) return checked(is_method_ ? with_one_(one, nullptr) : with_one_(self_, one));
    if (with_any_ != nullptr) return checked(with_any_(self_, &one, 1, nullptr));
    return checked(PyObject_CallOneArg(function_.ptr(), one));
  }

 private:
  using WithAny = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

  py::object function_;
  PyObject* self_ = nullptr;  // that the function keeps alive
  bool is_method_ = false;
  PyCFunction with_none_ = nullptr, with_one_ = nullptr;
  WithAny with_any_ = nullptr;
};

// A property, itself an attribute of a class written in C.
class Property {
 public:
  explicit Property(py::object property) : property_(std::move(property)) {
    if (Py_IS_TYPE(property_.ptr(), &PyGetSetDescr_Type))
      definition_ = reinterpret_cast<PyGetSetDescrObject*>(property_.ptr())->d_getset;
  }

  // Of an object of that class.
  py::object operator()(py::handle object) const {
    assert(definition_ == nullptr || PyObject_TypeCheck(object.ptr(), PyDescr_TYPE(property_.ptr())));
    if (definition_ != nullptr) return checked(definition_->get(object.ptr(), definition_->closure));
    return checked(Py_TYPE(property_.ptr())->tp_descr_get(property_.ptr(), object.ptr(), nullptr));
  }

 private:
  py::object property_;
  const PyGetSetDef* definition_ = nullptr;
};

}  // namespace ndsoftmax
