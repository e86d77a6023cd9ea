// Floor watches what a speaker, a proxy or kube-proxy watches, with client-go's informers, and does
// nothing with it: what it costs, watching costs. It serves the seconds of a processor that it has taken, and
// how many objects of each kind it has heard:
//
//	floor KUBECONFIG speaker|proxy|kube-proxy ADDRESS
package main

import (
	"fmt"
	"log"
	"net/http"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

// own are the kinds of Landfall that each program watches.
var own = map[string][]string{
	"speaker":    {"ipaddresspools", "l2advertisements", "bgpadvertisements", "bgppeers", "bfdprofiles", "communities"},
	"proxy":      {"ipaddresspools"},
	"kube-proxy": {},
}

func main() {
	if len(os.Args) != 4 || own[os.Args[2]] == nil {
		log.Fatal("usage: floor KUBECONFIG speaker|proxy|kube-proxy ADDRESS")
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		log.Fatal(err)
	}
}

func run(kubeconfig, program, address string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	config.ContentType = runtime.ContentTypeProtobuf
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	builtIn := informers.NewSharedInformerFactory(client, 0)
	heard := counts{}
	heard.count("services", builtIn.Core().V1().Services().Informer())
	heard.count("nodes", builtIn.Core().V1().Nodes().Informer())
	if program != "speaker" {
		heard.count("endpointslices", builtIn.Discovery().V1().EndpointSlices().Informer())
		heard.count("servicecidrs", builtIn.Networking().V1().ServiceCIDRs().Informer())
	}
	config.ContentType = runtime.ContentTypeJSON
	custom, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	landfall := dynamicinformer.NewDynamicSharedInformerFactory(custom, 0)
	for _, resource := range own[program] {
		kind := schema.GroupVersionResource{Group: "landfall.dev", Version: "v1beta1", Resource: resource}
		heard.count(resource, landfall.ForResource(kind).Informer())
	}
	forever := make(chan struct{})
	builtIn.Start(forever)
	landfall.Start(forever)
	builtIn.WaitForCacheSync(forever)
	landfall.WaitForCacheSync(forever)
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		var used syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		seconds := time.Duration(used.Utime.Nano() + used.Stime.Nano()).Seconds()
		fmt.Fprintf(w, "process_cpu_seconds_total %g\n", seconds)
		for resource, n := range heard {
			fmt.Fprintf(w, "heard_total{resource=%q} %d\n", resource, n.Load())
		}
	})
	return http.ListenAndServe(address, nil)
}

// counts are how many objects of each kind have come, by list or by watch.
type counts map[string]*atomic.Int64

func (c counts) count(resource string, informer cache.SharedIndexInformer) {
	n := new(atomic.Int64)
	c[resource] = n
	if err := informer.SetTransform(func(o any) (any, error) {
		n.Add(1)
		return o, nil
	}); err != nil {
		log.Fatal(err) // it runs already
	}
}
