package main

import (
	"encoding/binary"
	"hash/maphash"
	"net/netip"
	"reflect"
	"time"
	"unsafe"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// The model copies worlds and compares them. The rooms keep what they remember to themselves, so
// both go through all fields by reflection.

// whole are types whose values are copied as they are.
var whole = map[reflect.Type]bool{
	reflect.TypeFor[time.Time](): true, reflect.TypeFor[netip.Addr](): true, reflect.TypeFor[netip.Prefix](): true,
	reflect.TypeFor[netip.AddrPort](): true, reflect.TypeFor[*world](): true,
}

// copied returns a value that shares no memory with v, except of what whole names.
func copied[T any](v *T) T {
	var into T
	copyValue(reflect.ValueOf(&into).Elem(), reflect.ValueOf(v).Elem())
	return into
}

// open returns a field with which everything may be done.
func open(f reflect.Value) reflect.Value {
	return reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem()
}

// settable returns a copy of v that has an address.
func settable(v reflect.Value) reflect.Value {
	c := reflect.New(v.Type()).Elem()
	c.Set(v)
	return c
}

func copyValue(into, v reflect.Value) {
	switch {
	case whole[v.Type()]:
		into.Set(v)
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			copyValue(open(into.Field(i)), open(v.Field(i)))
		}
	case v.Kind() == reflect.Array:
		for i := range v.Len() {
			copyValue(into.Index(i), v.Index(i))
		}
	case v.Kind() == reflect.Slice && !v.IsNil():
		into.Set(reflect.MakeSlice(v.Type(), v.Len(), v.Len()))
		for i := range v.Len() {
			copyValue(into.Index(i), v.Index(i))
		}
	case v.Kind() == reflect.Map && !v.IsNil():
		into.Set(reflect.MakeMapWithSize(v.Type(), v.Len()))
		for each := v.MapRange(); each.Next(); {
			value := reflect.New(v.Type().Elem()).Elem()
			copyValue(value, settable(each.Value()))
			into.SetMapIndex(each.Key(), value)
		}
	case v.Kind() == reflect.Pointer && !v.IsNil():
		into.Set(reflect.New(v.Type().Elem()))
		copyValue(into.Elem(), v.Elem())
	default:
		into.Set(v)
	}
}

// digest is a fingerprint of a world: two worlds with the same one go on alike. Times count by how
// long ago they are, as no plan remembers more than remembered, and changes of claims by how many
// came after.
type digest struct {
	maphash.Hash
	now   time.Time
	nodes []*modelNode
	lease string // the version of the Lease
}

// remembered is longer than everything that a plan waits for on one LAN.
const remembered = 90 * time.Second

// counters only grow: what counts is whether they differ, which shows elsewhere. At is the clock of who
// renewed the Lease, by which nobody goes.
var counters = map[string]bool{"rounds": true, "round": true, "Round": true, "changes": true, "At": true,
	"Number": true, "seq": true}

func (d *digest) number(n int64) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(n))
	d.Write(b[:])
}

func (d *digest) flag(set bool) {
	if set {
		d.number(1)
	} else {
		d.number(0)
	}
}

func (d *digest) value(v reflect.Value) {
	switch special := v.Addr().Interface().(type) {
	case **world:
		return
	case *time.Time:
		if special.IsZero() {
			d.number(-1 << 60)
		} else {
			d.number(int64(max(-remembered, min(remembered, special.Sub(d.now)))))
		}
		return
	case *netip.Addr:
		b := special.As16()
		d.Write(b[:])
		return
	case *netip.AddrPort:
		b := special.Addr().As16()
		d.Write(b[:])
		return
	case *plan.Point:
		d.number(int64(special.Born))
		d.number(d.behind(special.Seq))
		return
	}
	d.parts(v)
}

// behind returns how many changes a node has made since one of its numbers.
func (d *digest) behind(seq uint64) int64 {
	if seq == 0 {
		return -1
	}
	return int64(d.nodes[seq/seqs-1].seq - seq)
}

func (d *digest) parts(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			switch name := v.Type().Field(i).Name; {
			case counters[name]:
			case name == "version":
				d.flag(v.Field(i).String() == d.lease)
			default:
				d.value(open(v.Field(i)))
			}
		}
	case reflect.Array, reflect.Slice:
		d.number(int64(v.Len()))
		for i := range v.Len() {
			d.value(v.Index(i))
		}
	case reflect.Map:
		sum := uint64(0)
		for each := v.MapRange(); each.Next(); {
			one := digest{now: d.now, nodes: d.nodes, lease: d.lease}
			one.SetSeed(d.Seed())
			one.value(settable(each.Key()))
			one.value(settable(each.Value()))
			sum += one.Sum64()
		}
		d.number(int64(v.Len()))
		d.number(int64(sum))
	case reflect.Pointer:
		if d.number(0); !v.IsNil() {
			d.number(1)
			d.value(v.Elem())
		}
	case reflect.String:
		d.number(int64(v.Len()))
		d.WriteString(v.String())
	case reflect.Bool:
		d.flag(v.Bool())
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		d.number(v.Int())
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		d.number(int64(v.Uint()))
	}
}
