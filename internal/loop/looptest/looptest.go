// Package looptest has tests hang the loops of actors, to see whether their liveness says so.
package looptest

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Hanging is for how long a pulse that hangs has done so.
const Hanging = time.Hour

// Pulse is one that an actor has.
type Pulse struct {
	// Path says where the actor has it.
	Path  string
	value any
}

// Pulses returns the pulses in an actor: in its fields, in the loops and structs of its own package that they point to,
// and in actors of which it is made. It is no use while the actor runs.
func Pulses(of any) []Pulse {
	f := finder{seen: map[unsafe.Pointer]bool{}}
	f.find(reflect.ValueOf(of), reflect.Indirect(reflect.ValueOf(of)).Type().PkgPath(), "")
	return f.found
}

type finder struct {
	seen  map[unsafe.Pointer]bool
	found []Pulse
}

func (f *finder) find(v reflect.Value, pkg, path string) {
	switch v.Kind() {
	case reflect.Interface:
		if !v.IsNil() && v.Type() == reflect.TypeFor[actor.Runner]() {
			inner := reflect.Indirect(v.Elem())
			f.find(inner, inner.Type().PkgPath(), path)
		}
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			f.find(v.Index(i), pkg, fmt.Sprintf("%s[%d]", path, i))
		}
	case reflect.Pointer:
		if v.IsNil() || f.seen[v.UnsafePointer()] {
			return
		}
		f.seen[v.UnsafePointer()] = true
		if path != "" && v.Type() != reflect.TypeFor[*loop.Runner]() && v.Type().Implements(reflect.TypeFor[actor.Runner]()) {
			return // another actor, with a liveness of its own
		}
		f.find(v.Elem(), pkg, path)
	case reflect.Struct:
		if own := v.Type().PkgPath(); own != pkg && own != reflect.TypeFor[loop.Runner]().PkgPath() {
			return
		}
		switch v.Type() {
		case reflect.TypeFor[loop.Pulse](), reflect.TypeFor[loop.Pulses]():
			if v.CanAddr() {
				f.found = append(f.found, Pulse{strings.TrimPrefix(path, "."),
					reflect.NewAt(v.Type(), unsafe.Pointer(v.UnsafeAddr())).Interface()})
			}
			return
		}
		for i := range v.NumField() {
			f.find(v.Field(i), pkg, path+"."+v.Type().Field(i).Name)
		}
	}
}

// Hang has the pulse be that of a loop that has begun something long ago. It returns what ends that.
func (p Pulse) Hang(t testing.TB) (end func()) {
	t.Helper()
	began := time.Now().Add(-Hanging)
	switch pulse := p.value.(type) {
	case *loop.Pulse:
		end = pulse.Begin()
		since := reflect.ValueOf(pulse).Elem().FieldByName("since")
		*(*time.Time)(unsafe.Pointer(since.UnsafeAddr())) = began
	case *loop.Pulses:
		end = pulse.Begin()
		all := reflect.ValueOf(pulse).Elem().FieldByName("all")
		times := *(*map[uint64]time.Time)(unsafe.Pointer(all.UnsafeAddr()))
		for id := range times {
			times[id] = began
		}
	}
	return end
}

// WantLive hangs each loop of each actor in turn, and wants the liveness that is watched under the actor's name to
// report it, and to be content before and after. without are the actors that have no loop.
func WantLive[A any](t *testing.T, actors map[string]A, live map[string]func() time.Duration, without ...string) {
	t.Helper()
	for name, a := range actors {
		busy := live[name]
		if busy == nil {
			t.Errorf("%s: nothing watches whether it hangs", name)
			continue
		}
		pulses := Pulses(a)
		if none := slices.Contains(without, name); none != (len(pulses) == 0) {
			t.Errorf("%s: %d loops; is it without? %v", name, len(pulses), none)
		}
		for _, p := range pulses {
			if got := busy(); got != 0 {
				t.Errorf("%s: at rest, busy for %v", name, got)
			}
			end := p.Hang(t)
			if got := busy(); got < Hanging {
				t.Errorf("%s: %s hangs, and it is busy for %v", name, p.Path, got)
			}
			end()
		}
		t.Logf("%s: %d loops", name, len(pulses))
	}
}

// WantActors wants each actor that a struct tells among those that are given: each field, also of structs in it, whose
// value has a loop.
func WantActors[A any](t *testing.T, actors map[string]A, told ...any) {
	t.Helper()
	known := map[any]bool{}
	for _, a := range actors {
		for _, each := range append(parts(any(a)), any(a)) {
			if reflect.ValueOf(each).Comparable() {
				known[each] = true
			}
		}
	}
	var look func(v reflect.Value, path string)
	look = func(v reflect.Value, path string) {
		for i := range v.NumField() {
			at, field := path+"."+v.Type().Field(i).Name, v.Field(i)
			if field.Kind() == reflect.Struct {
				look(field, at)
				continue
			}
			if field.Kind() == reflect.Interface {
				field = field.Elem()
			}
			if field.Kind() != reflect.Pointer || field.IsNil() || !field.Type().Implements(reflect.TypeFor[actor.Runner]()) {
				continue
			}
			value := reflect.NewAt(field.Type().Elem(), field.UnsafePointer()).Interface()
			if !known[value] && field.Type() != reflect.TypeFor[*loop.Runner]() {
				t.Errorf("%s, a %s, is not among the actors that run", at, field.Type())
			}
		}
	}
	for _, one := range told {
		v := reflect.Indirect(reflect.ValueOf(one))
		look(v, v.Type().Name())
	}
}

// parts returns the actors of which one is made.
func parts(a any) (all []any) {
	v := reflect.ValueOf(a)
	if v.Kind() != reflect.Struct {
		return nil
	}
	for _, field := range v.Fields() {
		if field.Type() == reflect.TypeFor[actor.Runner]() && !field.IsNil() {
			inner := field.Elem()
			all = append(all, reflect.NewAt(inner.Type().Elem(), inner.UnsafePointer()).Interface())
		}
	}
	return all
}

// WantPackages wants one of the actors to be of each package below a folder that declares an actor. elsewhere are
// those, relative to the folder, that run in another program.
func WantPackages[A any](t *testing.T, folder string, actors map[string]A, elsewhere ...string) {
	t.Helper()
	var run []string
	for _, a := range actors {
		for _, each := range append(parts(any(a)), any(a)) {
			run = append(run, reflect.Indirect(reflect.ValueOf(each)).Type().PkgPath())
		}
	}
	err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		pkg, err := filepath.Rel(folder, filepath.Dir(path))
		if pkg == "." || slices.Contains(elsewhere, pkg) || !bytes.Contains(text, []byte(") Busy() time.Duration {")) {
			return err
		}
		if !slices.ContainsFunc(run, func(path string) bool { return strings.HasSuffix(path, "/"+pkg) }) {
			t.Errorf("package %s has an actor that is not among those that run", pkg)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
